"""Warnings about a request, in a header of the response and in the log: unknown fields, which may be misspelt."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from starlette.responses import Response

from polarlm.server.reading.values import is_empty
from polarlm.server.running import journal

HEADER = "X-PolarLM-Warning"

_MOST = 5  # warnings
_LONGEST_NAME = 40
_LONGEST = 200  # characters of a warning
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_UNSAFE = re.compile(r"[^ -~]")  # characters that a header cannot have


def unknown_fields(body: Mapping[str, Any], known: Collection[str], inside: str = "") -> list[str]:
    """A sentence for each of the first unknown fields of `body`. inside: the path of `body`, such as "options."."""
    strange = [name for name, value in body.items() if name not in known and not is_empty(value)]
    sentences = [_unknown(name, known, inside) for name in strange[:_MOST]]
    return [*sentences, f"{len(strange) - _MOST} more fields are unknown"] if len(strange) > _MOST else sentences


def _unknown(name: str, known: Collection[str], inside: str) -> str:
    name = name[:_LONGEST_NAME]
    name = name if _PLAIN.fullmatch(name) else ascii(name)
    (meant,) = get_close_matches(name, known, n=1, cutoff=0.75) or ("",)
    return f"{inside}{name} is unknown and ignored" + (f": did you mean {inside}{meant}?" if meant else "")


def warn(response: Response, sentences: Sequence[str]) -> Response:
    """`response` with the warnings in a header; they are also added to the request's line in the log."""
    if sentences:
        warning = "; ".join(_UNSAFE.sub("?", sentence)[:_LONGEST] for sentence in sentences[: _MOST + 1])
        response.headers[HEADER] = warning
        if entry := journal.current():
            entry.warning = warning
    return response
