"""Reads the arguments of a call while they are generated, and gives them as JSON.

Each has `push`, which returns the new JSON text and, once the arguments are complete, the text after them, else None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from polarlm.engine.sampling.detokenizer import overlap
from polarlm.engine.schemas.keywords import KINDS, kind_of
from polarlm.engine.schemas.normal_form import kinds_of_property, normal_form
from polarlm.model_loaders.chat.call_arguments import CallFields

_CONSTANTS = {"None": "null", "True": "true", "False": "false"}  # as templates in Python's language may write them
_TEXT = frozenset({"string"})
_WORD = re.compile(r"\A\s*[\w.+-]*")
# Of a string with escapes: text, an escape, or a quote. Nothing matches an escape that is not complete.
_PART = re.compile(
    r"""[^\\'"]+|['"]|\\(?P<escape>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"""
    r"""|(?!x[0-9a-fA-F]?\Z|u[0-9a-fA-F]{0,3}\Z|U[0-9a-fA-F]{0,7}\Z).)""",
    re.DOTALL,
)
_ESCAPES = {
    **{"\\": "\\", "'": "'", '"': '"', "/": "/", "\n": "", "0": "\0"},
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"},
}


class JsonArguments:
    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> tuple[str, str | None]:
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[: at + 1], text[at + 1 :]
        return text, None


class QuotedArguments:
    """Arguments whose strings stand between quotes of the model's own: see `model_loaders.chat.call_arguments`.

    Also one value of JSON or Python: it ends with its last bracket or quote, or where a word ends.
    """

    def __init__(self, *quotes: str, escapes: bool = False) -> None:
        """quotes: which may stand around strings. escapes: whether there are escapes in them."""
        self._quotes, self._escapes = quotes, escapes
        self._pending = ""  # text that is not read yet
        self._open = ""  # the brackets that are open
        self._quote = ""  # of the string that is being read
        self._word = ""  # a name, or a value that is no string, so far
        self._names = False  # whether a name is next

    def push(self, text: str) -> tuple[str, str | None]:
        self._pending += text
        json_text = ""
        while self._pending:
            if self._quote:
                json_text += self._read_escaped() if self._escapes else self._inside()
                if not self._pending.startswith(self._quote):
                    break
                self._pending, self._quote = self._pending[len(self._quote) :], ""
                json_text += '"'
            elif quote := next((quote for quote in self._quotes if self._pending.startswith(quote)), ""):
                self._pending, self._quote = self._pending[len(quote) :], quote
                json_text += '"'
                continue
            elif any(quote.startswith(self._pending) for quote in self._quotes):
                break
            elif self._open or self._pending[0] in "{[":
                json_text += self._structure()
            else:
                rest = _WORD.sub("", self._pending, count=1)
                self._word, self._pending = self._word + self._pending[: len(self._pending) - len(rest)], rest
                if not rest:
                    break
                json_text += _value(self._word.strip())
            if not self._open:
                rest, self._pending = self._pending, ""
                return json_text, rest
        return json_text, None

    def _inside(self) -> str:
        """The pending part of a string without escapes, as JSON; its quote, or what may begin one, stays pending."""
        inside, end_text, _ = self._pending.partition(self._quote)
        end = len(inside) - (0 if end_text else overlap(inside, self._quote))
        self._pending = self._pending[end:]
        return json.dumps(inside[:end], ensure_ascii=False)[1:-1]

    def _read_escaped(self) -> str:
        """The same of a string with escapes, as JSON and Python have them; an unknown one is itself."""
        json_text = ""
        while (part := _PART.match(self._pending)) is not None and part[0] != self._quote:
            escape, self._pending = part["escape"], self._pending[part.end() :]
            if escape is None:
                json_text += json.dumps(part[0], ensure_ascii=False)[1:-1]
            elif escape[0] in "xuU" and len(escape) > 1:
                code = int(escape[1:], 16)
                json_text += f"\\u{code:04x}" if code < 1 << 16 else chr(code) if code < 0x110000 else "\ufffd"
            else:
                json_text += json.dumps(_ESCAPES.get(escape, part[0]), ensure_ascii=False)[1:-1]
        return json_text

    def _structure(self) -> str:
        character, self._pending = self._pending[0], self._pending[1:]
        if character not in (",{}[]:" if self._names else ",{}[]"):
            self._word += character
            return ""
        word = self._word.strip()
        self._word = ""
        json_text = _value(word) if word and character != ":" else json.dumps(word, ensure_ascii=False) if word else ""
        if character in "{[":
            self._open += character
        elif character in "}]":
            self._open = self._open[:-1]
        self._names = character in "{,}]" and self._open.endswith("{")
        return json_text + character


def _value(word: str) -> str:
    """A value without quotes as JSON: as it is, or as a string if it is none."""
    try:
        json.loads(word, parse_constant=int)  # which raises for NaN and infinity
    except ValueError:
        return _CONSTANTS.get(word) or json.dumps(word, ensure_ascii=False)
    return word


class FieldArguments:
    """Arguments that are names and values between texts, as JSON: see `CallFields`.

    A value without quotes is text where its schema allows strings alone; else it is JSON if it is of a type that the
    schema allows.
    """

    def __init__(self, fields: CallFields, closing: str, schema: Any) -> None:
        """closing: what follows the arguments. schema: of all arguments, as an object."""
        self._fields, self._closing, self._schema = fields, closing, dict[str, Any]()
        if isinstance(schema, Mapping) and not fields.quote:
            with suppress(ValueError):
                self._schema = normal_form(schema)
        self._begin = fields.prefix  # what the next argument begins with
        self._state: Callable[[], str | None] | None = self._next
        self._kinds = KINDS  # that the value may have
        self._reader = QuotedArguments()
        self._pending = ""  # text that is not read yet
        self._opening = "{"  # what is to be written before the next name

    def push(self, text: str) -> tuple[str, str | None]:
        self._pending += text
        json_text = ""
        while self._state is not None:
            if (more := self._state()) is None:
                return json_text, None
            json_text += more
        return json_text, self._pending

    # Each state is a method that returns the JSON that it finds, or None if it needs more text.

    def _next(self) -> str | None:
        closing, begin, fields = self._closing, self._begin.strip(), self._fields
        if closing.startswith(self._pending) and closing != self._pending:
            return None
        ends = self._pending.startswith(closing)
        if not ends:
            self._pending = self._pending.lstrip()  # models are freer with white space than templates
        if not ends and begin.startswith(self._pending) and (begin != self._pending or not begin):
            return None
        if ends or self._pending.startswith(closing) or not self._pending.startswith(begin):
            self._state = None
            return "{}" if self._opening == "{" else "}"
        text = self._pending[len(begin) :]
        joints = [joint for joint in (fields.joint, fields.other_joint) if joint and joint in text]
        if not joints:
            return None
        joint = min(joints, key=text.index)
        name, _, self._pending = text.partition(joint)
        name, self._begin = name.strip(), fields.separator + fields.prefix
        json_text, self._opening = f"{self._opening}{json.dumps(name, ensure_ascii=False)}: ", ", "
        if fields.quote:
            self._reader, self._state = QuotedArguments("'", '"', escapes=True), self._literal
            return json_text
        self._kinds = kinds_of_property(self._schema, name)
        if fields.other_joint:  # which tells what the value is, whatever the schema allows
            self._kinds = _TEXT if joint == fields.joint else self._kinds - _TEXT
        is_text = self._kinds == _TEXT
        self._state = self._text if is_text else self._any
        return json_text + '"' * is_text

    def _literal(self) -> str | None:
        if not self._pending:
            return None
        json_text, rest = self._reader.push(self._pending)
        self._pending = rest or ""
        if rest is not None:
            self._state = self._after_value
        return json_text

    def _after_value(self) -> str | None:
        suffix = self._fields.suffix
        if suffix.startswith(self._pending) and suffix != self._pending and suffix:
            return None
        self._pending, self._state = self._pending.removeprefix(suffix), self._next
        return ""

    def _text(self) -> str | None:
        text, end_text, rest = self._pending.partition(self._fields.suffix)
        end = len(text) - (0 if end_text else overlap(text, self._fields.suffix))
        self._pending, self._state = (rest, self._next) if end_text else (self._pending[end:], self._text)
        json_text = json.dumps(text[:end], ensure_ascii=False)[1:-1] + '"' * bool(end_text)
        return json_text if json_text else None

    def _any(self) -> str | None:
        text, end_text, rest = self._pending.partition(self._fields.suffix)
        if not end_text:
            return None
        self._pending, self._state = rest, self._next
        return _typed_value(text, self._kinds)


def _typed_value(text: str, kinds: Collection[str]) -> str:
    """A value without quotes as JSON: of one of these types where its text has one of them, else a string."""
    word = _CONSTANTS.get(text, text)
    try:
        kind = kind_of(json.loads(word, parse_constant=int))  # which raises for NaN and infinity
    except (ValueError, RecursionError):
        json_text, rest = QuotedArguments("'", '"', escapes=True).push(text.strip() if text.strip()[:1] in "[{" else "")
        return json_text if rest == "" and "string" not in kinds else json.dumps(text, ensure_ascii=False)
    is_text = "string" in kinds and (kind not in kinds or kind == "string" or text != text.strip())
    return json.dumps(text, ensure_ascii=False) if is_text else word
