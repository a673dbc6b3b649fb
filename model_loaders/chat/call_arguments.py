"""Arguments of past calls, which clients send back as text: a JSON object, or any other text."""

from __future__ import annotations

import json
from typing import Any

_MOST_DEPTH = 64  # of nested arguments


def json_object(text: str) -> dict[str, Any] | None:
    """`text` as a JSON object; None for any other text, and for objects that no template can write."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate
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
