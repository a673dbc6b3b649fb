"""PDF files, written by hand."""

from __future__ import annotations


def made_pdf(text: str) -> bytes:
    """A PDF of one page with a line of ASCII text."""
    content = f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET" if text else ""
    fonts = "/Resources << /Font << /F1 5 0 R >> >>"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R {fonts} >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    written, places = "%PDF-1.4\n", []
    for number, described in enumerate(objects, 1):
        places.append(len(written))
        written += f"{number} 0 obj\n{described}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n{len(written)}\n%%EOF\n"
    return f"{written}xref\n0 6\n0000000000 65535 f \n{table}{end}".encode()
