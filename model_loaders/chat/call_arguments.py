"""Arguments of calls: clients send and get them as text, a JSON object; templates may write them in other forms.

Where a template writes a call as `name{key:<|"|>text<|"|>,count:7}`, strings stand between quotes of its own, in which
nothing is escaped, and names of fields have none. Where it writes each argument between texts of its own, in tags or as
in a call of Python's, `CallFields` describes these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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


def quote_value(value: Any, quote: str) -> str:
    """A JSON value as templates with a `quote` of their own write it, fields in the order of Jinja's `dictsort`."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        fields = sorted(value.items(), key=dictsort_key)
        return "{" + ",".join(f"{name}:{quote_value(inner, quote)}" for name, inner in fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(quote_value(inner, quote) for inner in value) + "]"
    return json.dumps(value)


@dataclass(frozen=True)
class CallFields:
    """How arguments are written that are no object: a name, its value, and texts around them.

    Of values outside of lists and objects, a string without quotes is its text itself, whatever it has.
    """

    prefix: str  # before a name
    joint: str  # between a name and its value; where `other_joint` is not empty, between a name and a string
    suffix: str  # after a value
    separator: str  # between two arguments
    quote: str = ""  # around a string, with escapes: ' or "; empty if strings are not quoted
    python: tuple[str, ...] = ()  # of "words" (truth values and null), "array", "object": what is no JSON but Python's
    other_joint: str = ""  # between a name and a value that is no string

    def write(self, arguments: Mapping[str, Any]) -> str:
        """The text of arguments; empty if there are none."""
        texts = (
            f"{self.prefix}{name}{self.joint_before(value)}{self.value(value)}{self.suffix}"
            for name, value in arguments.items()
        )
        return self.separator.join(texts)

    def joint_before(self, value: Any) -> str:
        """The text between a name and this value."""
        return self.joint if isinstance(value, str) else self.other_joint or self.joint

    def value(self, value: Any) -> str:
        """The text of an argument's value."""
        if isinstance(value, str):
            if not self.quote:
                return value
            return f"'{value.translate(_ESCAPES)}'" if self.quote == "'" else json.dumps(value, ensure_ascii=False)
        kind = "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "words"
        return repr(value) if kind in self.python else json.dumps(value, ensure_ascii=False)


_ESCAPES = str.maketrans({"\\": "\\\\", "'": "\\'", "\n": "\\n"})


def dictsort_key(field: tuple[str, Any]) -> str:
    """The key by which `dictsort` sorts the fields of an object."""
    return field[0].lower()
