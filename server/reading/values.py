"""Reads and validates values of a client's JSON. Every error is a sentence that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Body = Mapping[str, Any]
FieldWarnings = list[tuple[str, str]]  # fields, and sentences about what is not done as they ask
LARGEST = 2**63 - 1
_LONGEST_NUMBER = 40  # characters of one in quotes

# An escape of JSON: both halves of a character together, one half alone, or another one.
_HALF = "u[dD][{}][0-9a-fA-F]{{2}}".format
_ESCAPE = re.compile(rf"\\(?:{_HALF('89abAB')}\\{_HALF('c-fC-F')}|({_HALF('89a-fA-F')})|.)", re.DOTALL)


class BadRequest(Exception):
    """A request is malformed or asks for an unsupported feature. The message is a sentence for the client; `field` is
    the path of the wrong field, such as "messages[2].content", or None for the request as a whole."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Half of a character, which programs leave that cut texts in UTF-16, becomes U+FFFD: it
    has no UTF-8 form. Raises BadRequest."""
    try:
        # Some shells write a byte order mark. NaN and Infinity are accepted here: `number` refuses them by name.
        text = data.decode("utf-8-sig")
        if "\\ud" in text or "\\uD" in text:
            text = _ESCAPE.sub(lambda match: "\\ufffd" if match[1] else match[0], text)
        value = json.loads(text)
    except UnicodeDecodeError:
        raise BadRequest(None, "the request is not UTF-8 text") from None
    except RecursionError:
        raise BadRequest(None, "the request is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(None, f"the request is not JSON: {error.msg}, at character {error.pos}") from None
    except ValueError:  # Python's limit to the digits of a whole number
        raise BadRequest(None, "the request holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise BadRequest(None, f"the request must be a JSON object, not {_kind(value)}")
    return value


def is_empty(value: Any) -> bool:
    """Whether a value is null, or an empty text, array or object."""
    return value is None or value in ("", [], {})


def is_number(value: Any) -> bool:
    """Whether a value is a number in JSON, where true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_value(field, "true or false", value)
    return value


def count(field: str, value: Any, low: float, high: float) -> int:
    """A whole number, which may be written as 5.0 or in quotes."""
    whole = unquote(value)
    if isinstance(whole, float) and whole.is_integer():
        whole = int(whole)
    if not isinstance(whole, int) or isinstance(whole, bool):
        raise wrong_value(field, "a whole number", value)
    if not low <= whole <= high:
        raise BadRequest(field, f"{field} must be from {low} to {high}, not {describe(whole)}")
    return whole


def number(field: str, value: Any) -> float:
    """A finite number, which may be in quotes: JSON also allows 1e999, which no float can hold."""
    value = unquote(value)
    if not is_number(value):
        raise wrong_value(field, "a number", value)
    if not (-LARGEST <= value <= LARGEST and math.isfinite(value)):
        raise BadRequest(field, f"{field} is {describe(value)}, which is out of range")
    return value


def unquote(value: Any) -> Any:
    """The number that a string spells, as vLLM takes it; anything else as it is."""
    if not isinstance(value, str) or len(value) > _LONGEST_NUMBER:
        return value
    try:
        number = json.loads(value)
    except ValueError:
        return value
    return number if is_number(number) else value


def text(field: str, value: Any, most: float = math.inf) -> str:
    """A string of at most `most` characters."""
    if not isinstance(value, str):
        raise wrong_value(field, "a string", value)
    if len(value) > most:
        raise BadRequest(field, f"{field} must have at most {most} characters, not {len(value)}")
    return value


def one_of(field: str, value: Any, names: Sequence[str]) -> str:
    if value not in names:
        raise wrong_value(field, " or ".join(filter(None, (", ".join(names[:-1]), names[-1]))), value)
    return str(value)


def array(field: str, value: Any, expected: str = "an array", least: int = 0) -> list[Any]:
    """An array of at least `least` items."""
    if not isinstance(value, list) or len(value) < least:
        raise wrong_value(field, expected, value)
    return value


def mapping(field: str, value: Any, expected: str = "an object") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_value(field, expected, value)
    return value


def check_at_most(most: int, field: str, number: int, what: str) -> None:
    if number > most:
        raise BadRequest(field, f"{field} has {number:,} {what}, but at most {most:,} are taken")


def wrong_value(field: str, expected: str, value: Any) -> BadRequest:
    return BadRequest(field, f"{field} must be {expected}, not {describe(value)}")


def describe(value: Any) -> str:
    """A value as part of a sentence: its JSON if that is short, otherwise its type."""
    if isinstance(value, (list, dict)) or value is None:
        return _kind(value)
    text = ascii(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"a {_kind(value).removeprefix('a ')} of {len(text)} characters"


def _kind(value: Any) -> str:
    if value == []:
        return "an empty array"
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
