"""The chat page, with headers that forbid any other script in it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from polarlm.engine.limits import Numbers
from polarlm.engine.params import OPTIONS, SAMPLING


@lru_cache(maxsize=1)
def _page() -> tuple[str, dict[str, str]]:
    text = _whole()
    policy = [
        "default-src 'none'",
        f"script-src {_hash('script', text)}",
        f"style-src {_hash('style', text)}",
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
    """page.html with its style sheet and its scripts, which become a single script, written into it."""
    folder = files("polarlm.server").joinpath("page")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    text = read("page.html").replace("        <!-- sampling options -->\n", "".join(map(_input, OPTIONS)))
    text = re.sub(r'<link rel="stylesheet" href="(.*?)">', lambda m: f"<style>\n{read(m[1])}</style>", text)
    scripts = re.findall(r'<script src="(.*?)"></script>\n', text)
    whole = '<script>\n"use strict";\n' + "".join(f"\n{read(name)}" for name in scripts) + "</script>\n"
    return re.sub(r"(?:<script src=.*?></script>\n)+", lambda _: whole, text)


def _input(name: str) -> str:
    """The field of a sampling option; empty for an option that the page does not show."""
    label, (numbers, _) = OPTIONS[name]["page"], SAMPLING[name]
    if label is None or not isinstance(numbers, Numbers):
        return ""
    limits = f' min="{numbers.low if numbers.low >= 1e-3 else 0:g}"'
    limits += f' max="{numbers.high:g}"' if numbers.high == 1 else ""
    step, mode = ("1", "numeric") if numbers.whole else ("any", "decimal")
    field = f'<input id="{name}" type="number"{limits} step="{step}" inputmode="{mode}">'
    return f'        <div><label for="{name}">{label}</label>{field}</div>\n'


def _hash(element: str, page: str) -> str:
    """The page's only inline element with this name, as a Content-Security-Policy names it: by its hash."""
    content = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


async def page(_request: Request) -> Response:
    """The chat page in one file; it uses the API as any other client does."""
    text, headers = _page()
    return Response(text, headers=headers, media_type="text/html")
