"""`python -m polarlm.server.reading.pdf MOST` reads a PDF from standard input, and writes JSON: {"text", "pages"}, with
at most MOST bytes of text, or {"error": a sentence}."""

from __future__ import annotations

import io
import json
import logging
import sys
from typing import Any

from polarlm.children import limit_memory

_MEMORY = 1 << 30  # bytes of address space


def read_pdf(data: bytes, most: int) -> dict[str, Any]:
    """The text of a PDF, its pages apart, and their number; or what is wrong with it, as an error."""
    import pypdf
    from pypdf.errors import DependencyError, PyPdfError

    if b"%PDF-" not in data[:1024]:
        return {"error": "This file is not a PDF"}
    pages: list[str] = []
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": "This PDF is locked with a password: attach a copy without one"}
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            most -= len(pages[-1].encode("utf-8", "replace"))
            if most < 0:
                return {"error": f"The first {len(pages)} pages of this PDF have more text than a request may have"}
    except DependencyError:
        return {"error": "This PDF is encrypted in a way that is not read here: attach a copy without encryption"}
    except (PyPdfError, ValueError, TypeError, KeyError, IndexError, AttributeError, OSError, RecursionError):
        return {"error": "This PDF is damaged" + (f": nothing is read beyond page {len(pages)}" if pages else "")}
    if not any(pages):
        return {"error": "This PDF has no text, only pictures, as scanned pages do"}
    text = "\n\n".join(page for page in pages if page)
    return {"text": text.encode("utf-8", "replace").decode(), "pages": len(pages)}  # without half surrogates


def main() -> None:
    limit_memory(_MEMORY)  # the parent limits the time
    logging.disable()  # pypdf warns of every oddity
    sys.stdout.write(json.dumps(read_pdf(sys.stdin.buffer.read(), int(sys.argv[1]))))


if __name__ == "__main__":
    main()
