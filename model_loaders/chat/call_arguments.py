"""Arguments of calls: clients send and get them as text, a JSON object; templates may write them otherwise.

Where a template writes a call as `name{key:<|"|>text<|"|>,count:7}`, strings stand between quotes of its own, in which
nothing is escaped, and names of fields have none.
"""

from __future__ import annotations

import json
from typing import Any

_MOST_DEPTH = 64  # levels of nested arguments


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


def quoted(value: Any, quote: str) -> str:
    """A JSON value as templates with a `quote` of their own write it, fields in the order of Jinja's `dictsort`."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        fields = sorted(value.items(), key=in_order)
        return "{" + ",".join(f"{name}:{quoted(inner, quote)}" for name, inner in fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(quoted(inner, quote) for inner in value) + "]"
    return json.dumps(value)


def in_order(field: tuple[str, Any]) -> str:
    """The key by which `dictsort` sorts the fields of an object."""
    return field[0].lower()
