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
    """The page and its headers, which allow its own script and style by their hashes, and no others."""
    text = files("polarlm.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hash_of('script', text)}",
        f"style-src {_hash_of('style', text)}",
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


def _hash_of(element: str, page: str) -> str:
    """A source of a Content-Security-Policy: the one inline element of that name."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


async def page(_request: Request) -> Response:
    """A chat in one file; it speaks to the API like any other client."""
    text, headers = _page()
    return Response(text, headers=headers, media_type="text/html")
