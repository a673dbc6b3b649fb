"""The arguments of past calls, which clients send back as text: that of a JSON object, or any other."""

from __future__ import annotations

import json
from typing import Any

_MOST_DEPTH = 64  # of arguments


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that is `text`; None for anything else, and for objects that no template can write."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except (ValueError, RecursionError):
        return None
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return value if isinstance(value, dict) and not level else None
