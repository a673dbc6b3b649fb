"""The chat page, and the headers that forbid any other script in it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


@lru_cache(maxsize=1)
def _page() -> tuple[str, dict[str, str]]:
    """The page and its headers, which allow its own scripts and styles by their hashes, and no others."""
    text = _whole()
    policy = [
        "default-src 'none'",
        f"script-src {_hashes('script', text)}",
        f"style-src {_hashes('style', text)}",
        "img-src data:",  # the icon
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
    return text, {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _whole() -> str:
    """page.html with the contents of the files that it names in the places of their names."""
    folder = files("polarlm.server").joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    text = re.sub(
        r'<link rel="stylesheet" href="(.*?)">', lambda m: f"<style>\n{read(m[1])}</style>", read("page.html")
    )
    return re.sub(r'<script src="(.*?)"></script>', lambda m: f"<script>\n{read(m[1])}</script>", text)


def _hashes(element: str, page: str) -> str:
    """A source list of a Content-Security-Policy: the inline elements of that name."""
    contents = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


async def page(_request: Request) -> Response:
    """A chat in one file; it speaks to the API like any other client."""
    text, headers = _page()
    return Response(text, headers=headers, media_type="text/html")
