"""What a request says about waiting: whether its answer is a stream, and how long its model is kept afterwards."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from polarlm.server.reading.values import BadRequest, wrong

_OF_OLLAMA = ("/api/chat", "/api/generate")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_LONGEST = 100 * 365 * 86400.0  # seconds; beyond it there is no date
_MOST_CHARACTERS = 100  # most characters of a duration; the time of the expression grows with their cube
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(ms|us|µs|ns|h|m|s)")


def streams(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the answer to a request is a stream; Ollama's are unless the request says otherwise."""
    asked = body.get("stream")
    return path in _OF_OLLAMA if asked is None else asked is True


def is_without_prompt(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a request of Ollama's API asks only to load or unload a model."""
    return path in _OF_OLLAMA and not any(body.get(name) for name in ("messages", "prompt", "suffix", "images"))


def keep_alive(value: Any) -> float | None:
    """Seconds that Ollama's field says, as a number or as "1h30m"; None, for a negative one or a century: without end.

    Raises BadRequest.

    >>> keep_alive("1h30m"), keep_alive(90), keep_alive("0"), keep_alive(-1), keep_alive(10**400)
    (5400.0, 90.0, 0.0, None, None)
    """
    is_nan = isinstance(value, float) and math.isnan(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not is_nan:
        return float(value) if 0 <= value < _LONGEST else None
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        raise wrong("keep_alive", 'seconds, or a text such as "10m"', value)
    number = value.lstrip("+-")
    parts = _DURATION.findall(number)
    if re.fullmatch(r"\d+\.?\d*", number):
        seconds = float(number)
    elif parts and "".join(map("".join, parts)) == number:
        seconds = sum(float(count) * _UNITS[unit] for count, unit in parts)
    else:
        raise BadRequest("keep_alive", 'keep_alive must be seconds, or a text such as "10m" or "1h30m"')
    return None if value.startswith("-") or seconds >= _LONGEST else seconds


def empty_piece(path: str, name: str) -> dict[str, Any]:
    """A line without text of a stream of Ollama's API."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    text = {"response": ""} if path == "/api/generate" else {"message": {"role": "assistant", "content": ""}}
    return {"model": name, "created_at": now, **text}
