"""Rules for arguments that are no JSON object, from the JSON schema of a function.

Fields come in the order in which templates write them. What is JSON (numbers, and mostly truth values and null; in tags
lists and objects) has all of its schema's keywords. Of strings, `enum` and `const` hold, and `pattern` of a strict
function; several schemas for one value, as in `allOf` or next to `anyOf`, are not joined. A strict function must not
have keywords that do not hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polarlm.engine.schemas.keywords import KIND_OF_KEYWORD
from polarlm.engine.schemas.preparation import OPTIONS
from polarlm.model_loaders.chat.call_arguments import CallFields, dictsort_key, quote_value

_SCALARS = ("number", "integer", "boolean", "null")
_HELD_KEYWORDS = frozenset(
    (
        *("type", "enum", "anyOf", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
        *("$defs", OPTIONS),
    )
)
_STRING = r"""/'([^'\\]|\\[^xuUN0-9])*'|"([^"\\]|\\[^xuUN0-9])*"/"""  # of Python; some templates escape nothing
_GROUPS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)  # tells whether | is in a group
_NAME = r"/[^\s:,{}\[\]<>\"]+/"  # name of a field that the schema does not list


def escape(text: str) -> str:
    """A regular expression that matches `text`, to be written between slashes."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _whole_pattern(pattern: str) -> str:
    """A schema's pattern as an expression of whole strings, to be written between slashes; empty if its alternatives
    have anchors of their own."""
    depth = 0
    for sign in _GROUPS.findall(pattern):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if sign == "|" and depth == 0:
            return ""
    is_ended = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    body = pattern.removeprefix("^").removesuffix("$" if is_ended else "")
    signs = {"/": "\\x2f", "\\/": "\\x2f", "\n": "\\n"}
    body = re.sub(r"\\.|[/\n]", lambda sign: signs.get(sign[0], sign[0]), body, flags=re.DOTALL)
    return f"{'' if pattern.startswith('^') else '(?s:.*)'}{body}{'' if is_ended else '(?s:.*)'}"


def shared_rules(quote: str, literal: Callable[[str], str], *, is_control: bool) -> list[str]:
    """The rules of all functions. literal: writes a text in a rule. is_control: whether the quote is a token."""
    if is_control:
        strings = [f"string: {literal(quote)} INSIDE {literal(quote)}", "INSIDE: /(?s:.*)/"]
    else:
        strings = [f"string: {literal(quote)} inside", f"inside[lazy]: /(?s:.*){escape(quote)}/"]
    return [
        *strings,
        'anything: string | scalar | "{" (field ("," field)*)? "}" | "[" (anything ("," anything)*)? "]"',
        f"scalar: %json {json.dumps({'type': list(_SCALARS)})}",
        'field: FIELD ":" anything',
        f"FIELD: {_NAME}",
    ]


def shared_field_rules(fields: CallFields, literal: Callable[[str], str], control: Iterable[str]) -> list[str]:
    """The rules of all functions with such arguments. control: the names of control tokens."""
    first = min((at for name in control if (at := fields.suffix.find(name)) >= 0), default=len(fields.suffix))
    text, rest = fields.suffix[:first], literal(fields.suffix[first:])
    value = '"True" | "False" | "None" | "[" (python (", " python)*)? "]" | "{" (pair (", " pair)*)? "}"'
    raw = [f"raw: RAW {rest}" if rest else "raw[lazy]: RAW", f"RAW: /(?s:.*){escape(text)}/"]
    return [
        *([] if fields.quote else raw),
        "ARGUMENT: /[\\w.$@-]+/",  # name of an argument that the schema does not list
        f"STRING: {_STRING}",
        f"python: STRING | number | {value}",
        'pair: STRING ": " python',
        'number: %json {"type": "number"}',
    ]


class QuotedRules:
    """Rules of values whose strings stand between quotes of the model's own; subclasses have other notations."""

    separator, brackets = ",", ("{", "}")  # between items and between fields, around fields
    any_value, any_name = "anything", 'FIELD ":"'  # where there is no schema: a value, and what stands before a field's

    def __init__(
        self, name: str, quote: str, literal: Callable[[str], str], warn: Callable[[str], None], *, strict: bool
    ) -> None:
        """warn: called with what does not hold."""
        self._warn = warn
        self._name, self._quote, self._literal, self._strict = name, quote, literal, strict
        self._root: Mapping[str, Any] = {}
        self._lines: list[str] = []
        self._references: dict[str, str] = {}

    def lines(self, schema: Mapping[str, Any]) -> list[str]:
        """The rule of this name, and the rules that it uses. Raises ValueError for a schema that cannot hold."""
        self._root = schema
        return [f"{self._name}: {self._value(schema)}", *self._lines]

    def _write_value(self, value: Any) -> str:
        return quote_value(value, self._quote)

    def _field_start(self, name: str) -> str:
        """What stands before the value of a field."""
        return f"{name}:"

    def _sort_fields(self, properties: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return sorted(properties.items(), key=dictsort_key)

    def _holds(self, kind: str) -> bool:
        """Whether all keywords of a schema of this type hold."""
        return kind in _SCALARS

    def _field_value(self, schema: Any) -> str:
        """The value of a field."""
        return self._value(schema)

    def _string(self, schema: Mapping[str, Any]) -> str:
        if "pattern" not in schema:
            return "string"
        return f"{self._literal(self._quote)} {self._text_up_to(self._quote, schema)}"

    def _text_up_to(self, end: str, schema: Mapping[str, Any]) -> str:
        """A text of the schema's pattern without `end` in it, and `end`, whose text belongs to the same lexeme."""
        written = self._literal(end)
        first, at = ("", 0) if written.startswith("<") else json.JSONDecoder().raw_decode(written)
        rest = written[at:].strip()
        unwanted = f"(?s:.*){escape(end)}(?s:.{'*' if rest else '+'})"
        expression = f"/(?:{_whole_pattern(schema['pattern'])}){escape(first)}/ & ~/{unwanted}/"
        return f"{self._rule(expression, is_terminal=True)} {rest}"

    def _rule(self, expression: str, *, is_terminal: bool = False) -> str:
        name = f"{self._name}_{len(self._lines)}"
        name = name.upper() if is_terminal else name
        self._lines.append(f"{name}: {expression}")
        return name

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            if schema is False:
                raise ValueError("a schema is false, so that no value fulfils it")
            return self.any_value
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        kinds = {KIND_OF_KEYWORD[key] for key in schema if key in KIND_OF_KEYWORD}
        is_untyped = not schema.keys() & {"type", "enum"}
        if is_untyped and len(kinds) == 1:
            (kind,) = kinds
            schema = {**schema, "type": kind}  # the type that is meant, of all that the keywords let pass
        kind = schema.get("type")
        held = _HELD_KEYWORDS.difference(KIND_OF_KEYWORD if is_untyped and len(kinds) > 1 else ())
        if self._strict and kind == "string" and _whole_pattern(schema.get("pattern", "|")):
            held |= {"pattern"}
        unheld = [] if kind is not None and self._holds(kind) else [key for key in schema if key not in held]
        if unheld and self._strict:
            raise ValueError(f"{unheld[0]} does not hold for this model, so the function cannot be strict")
        if unheld:
            self._warn(f"{', '.join(unheld)} does not hold for this model")
            schema = {key: value for key, value in schema.items() if key not in unheld}
        if "enum" in schema:
            return self._one_of([self._literal(self._write_value(value)) for value in schema["enum"]])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._one_of([self._value(inner) for inner in schema[key]])
        if kind is None:
            return self.any_value
        return {"string": self._string, "array": self._array, "object": self._object}.get(kind, self._scalar)(schema)

    def _scalar(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps(schema)}")

    def _one_of(self, choices: list[str]) -> str:
        if not choices:
            raise ValueError("a schema has no choices, so that no value fulfils it")
        return f"({' | '.join(choices)})"

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            name = self._references[reference] = f"{self._name}_of{len(self._references)}"
            self._lines.append(f"{name}: {self._value(self._root['$defs'][reference.rsplit('/')[-1]])}")
        return self._references[reference]

    def _array(self, schema: Mapping[str, Any]) -> str:
        item, least, most = self._value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        further = f"({json.dumps(self.separator)} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} {further}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Fields in order; the rule of the fields from one on is written for both, whether others precede it or not."""
        listed = {name: inner for name, inner in schema.get("properties", {}).items() if inner is not False}
        fields, separator = self._sort_fields(listed), self._literal(self.separator) or '""'
        required = set(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        other = "" if others is False else f"{self.any_name} {self._field_value(others)}"
        rest = {
            False: f"({other} ({separator} {other})*)?" if other else '""',
            True: f"({separator} {other})*" if other else '""',
        }
        for name, inner in reversed(fields):
            field = f"{self._literal(self._field_start(name))} {self._field_value(inner)}"
            rules = {}
            for is_preceded in (False, True):
                sequence = f"{field} {rest[True]}"
                sequence = f"{separator} {sequence}" if is_preceded else sequence
                rules[is_preceded] = self._rule(sequence if name in required else f"{sequence} | {rest[is_preceded]}")
            rest = rules
        opening, closing = map(json.dumps, self.brackets)
        return f"{opening} {rest[False]} {closing}"


class _PythonRules(QuotedRules):
    """Rules of literals of Python."""

    separator, any_value, any_name = ", ", "python", 'STRING ": "'

    def __init__(self, whole: QuotedRules) -> None:
        """whole: the rules of what these are values in."""
        super().__init__(f"{whole._name}_value", whole._quote, whole._literal, whole._warn, strict=whole._strict)
        self._root, self._lines = whole._root, whole._lines

    def _write_value(self, value: Any) -> str:
        return repr(value)

    def _field_start(self, name: str) -> str:
        return f"{name!r}: "

    def _sort_fields(self, properties: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return list(properties.items())

    def _string(self, schema: Mapping[str, Any]) -> str:
        return super()._scalar(schema) if "pattern" in schema else "STRING"  # of JSON, which Python reads

    def _scalar(self, schema: Mapping[str, Any]) -> str:
        return {"boolean": '("True" | "False")', "null": '"None"'}.get(schema["type"]) or super()._scalar(schema)


class _ValueRules(QuotedRules):
    """Rules of the value of one of several `CallFields`, and of the text after it."""

    def __init__(self, whole: FieldRules) -> None:
        super().__init__(f"{whole._name}_field", whole._quote, whole._literal, whole._warn, strict=whole._strict)
        self._root, self._lines, self._fields = whole._root, whole._lines, whole.fields
        self._after, self._python = self._literal(self._fields.suffix), _PythonRules(self)
        # A string with what stands before it, and what stands before other values if that differs.
        self._text, self._other, self.any_value = "raw", "", "raw"
        if self._quote:
            value = "python" if "words" in self._fields.python else self._rule("%json {}")
            self.any_value = f"{value} {self._after}"
        if self._fields.other_joint:
            self._text = f"{self._literal(self._fields.joint)} raw"
            self._other = f"{self._literal(self._fields.other_joint)} "
            value = self._rule(f"%json {json.dumps({'type': ['object', 'array', *_SCALARS]})}")
            self.any_value = f"({self._text} | {self._other}{value} {self._after})"

    def _write_value(self, value: Any) -> str:
        joint = self._fields.joint_before(value) if self._other else ""
        return joint + self._fields.value(value) + self._fields.suffix

    def _holds(self, kind: str) -> bool:
        return super()._holds(kind) or (self._quote == '"' if kind == "string" else kind not in self._fields.python)

    def _string(self, schema: Mapping[str, Any]) -> str:
        if not self._quote and "pattern" in schema:
            return f"{self._text.removesuffix('raw')}{self._text_up_to(self._fields.suffix, schema)}"
        if not self._quote:
            return self._text
        rule = super()._scalar(schema) if self._quote == '"' or "pattern" in schema else "STRING"
        return f"{rule} {self._after}"

    def _scalar(self, schema: Mapping[str, Any]) -> str:
        rule = self._python._scalar(schema) if "words" in self._fields.python else super()._scalar(schema)
        return f"{self._other}{rule} {self._after}"

    def _array(self, schema: Mapping[str, Any], kind: str = "array") -> str:
        if kind in self._fields.python:
            return f"{self._other}{self._python._value(schema)} {self._after}"
        whole = {name: self._root[name] for name in ("$defs", OPTIONS) if name in self._root}
        rule = self._rule(f"%json {json.dumps({**schema, **whole})}")
        return f"{self._other}{rule} {self._after}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        return self._array(schema, "object")


class FieldRules(QuotedRules):
    """Rules of arguments that are names and values between texts."""

    brackets = ("", "")

    def __init__(
        self, name: str, fields: CallFields, literal: Callable[[str], str], warn: Callable[[str], None], *, strict: bool
    ) -> None:
        """warn: as of `QuotedRules`."""
        super().__init__(name, fields.quote, literal, warn, strict=strict)
        self.fields, self.separator = fields, fields.separator
        self._joint = "" if fields.other_joint else fields.joint  # else it depends on the value
        self.any_name = f"{literal(fields.prefix)} ARGUMENT {literal(self._joint)}"

    def lines(self, schema: Mapping[str, Any]) -> list[str]:
        self._root = schema
        self._values = _ValueRules(self)
        self.any_value = self._object({})
        return super().lines(schema)

    def _write_value(self, value: Any) -> str:
        return self.fields.write(value)

    def _field_start(self, name: str) -> str:
        return f"{self.fields.prefix}{name}{self._joint}"

    def _sort_fields(self, properties: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return list(properties.items())

    def _field_value(self, schema: Any) -> str:
        return self._values._value(schema)
