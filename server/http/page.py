"""The chat page, with headers that forbid any other script in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from polarlm.engine.limits import Numbers
from polarlm.engine.params import OPTIONS, SAMPLING


@lru_cache(maxsize=1)
def _page() -> tuple[str, bytes, dict[str, str]]:
    """The page, the same compressed, and headers."""
    text = _build()
    policy = [
        "default-src 'none'",
        f"script-src {_hash('script', text)}",
        f"style-src {_hash('style', text)}",
        "font-src data:",
        "img-src data:",  # the icon, and images in messages
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
    compressed_page = gzip.compress(text.encode(), mtime=0)
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'W/"{hashlib.sha256(compressed_page).hexdigest()}"',
        "Vary": "Accept-Encoding",
    }
    return text, compressed_page, headers


def _build() -> str:
    """page.html with its style sheets and their fonts as a single style, and its scripts as a single script."""
    folder = files("polarlm.server").joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    def inline(text: str, reference: str, element: str, first: str = "") -> str:
        head, *names, tail = re.split(reference + "\n", text)
        return "\n".join([f"{head}<{element}>{first}", *map(read, names[::2]), f"</{element}>\n{tail}"])

    def font(match: re.Match[str]) -> str:
        content = folder.joinpath(f"vendor/katex/{match[1]}").read_bytes()
        return f"url(data:font/woff2;base64,{base64.b64encode(content).decode()})"

    text = read("page.html").replace("        <!-- temperature -->\n", _input("temperature"))
    others = "".join(_input(name) for name in OPTIONS if name != "temperature")
    text = text.replace("        <!-- other sampling options -->\n", others)
    text = inline(text, r'<link rel="stylesheet" href="(.*?)">', "style")
    text = re.sub(r"url\((fonts/[^)]*woff2)\)[^}]*", font, text)  # the same font in older formats follows
    return inline(text, r'<script src="(.*?)"></script>', "script", '\n"use strict";')


def _input(name: str) -> str:
    """The field of a sampling option; empty for an option that the page does not show."""
    label, (numbers, _) = OPTIONS[name]["page"], SAMPLING[name]
    if label is None or not isinstance(numbers, Numbers):
        return ""
    limits = f' min="{numbers.low if numbers.low >= 1e-3 else 0:g}"'
    limits += f' max="{numbers.high:g}"' if numbers.high == 1 else ""
    step, mode = ("1", "numeric") if numbers.whole else ("any", "decimal")
    sent = (OPTIONS[name]["json"] or (name,))[-1]  # the field of a request that it becomes
    hint = ' placeholder="No limit"' if numbers.low == -1 else ""
    field = f'<input id="{sent}" type="number"{limits} step="{step}" inputmode="{mode}"{hint}>'
    return f'        <div><label for="{sent}">{label}</label>{field}</div>\n'


def _hash(element: str, page: str) -> str:
    """The page's only inline element with this name, as a Content-Security-Policy names it: by its hash."""
    content = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


async def page(request: Request) -> Response:
    """The chat page in one file; it uses the API as any other client does."""
    text, compressed_page, headers = _page()
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(compressed_page, headers={**headers, "Content-Encoding": "gzip"}, media_type="text/html")
    return Response(text, headers=headers, media_type="text/html")
