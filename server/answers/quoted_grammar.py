"""Rules for arguments whose strings stand between quotes of the model's own, from the JSON schema of a function.

Fields come in the order in which templates write them. Numbers, truth values and null are JSON, and have all of their
schema's keywords. Of strings, `enum` and `const` hold; schemas of one value that are to hold together are not joined.
A strict function must not have keywords that do not hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from polarlm.engine.sampling.schemas import OPTIONS
from polarlm.model_loaders.chat.call_arguments import in_order, quoted

_SCALARS = ("number", "integer", "boolean", "null")
_TYPES = ("object", "array", "string", *_SCALARS)
_NOTES = ("title", "description", "default", "examples", "$schema", "$defs", "definitions", "$comment", OPTIONS)
_HELD = (
    *("type", "enum", "const", "anyOf", "oneOf", "$ref"),
    *("properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
)
_NAME = r"/[^\s:,{}\[\]<>\"]+/"  # name of a field that the schema does not list


def shared_rules(quote: str, literal: Callable[[str], str], *, is_control: bool, escaped: str) -> list[str]:
    """The rules of all functions. literal: writes a text in a rule. is_control: whether the quote is a control token.
    escaped: the quote in a regular expression."""
    if is_control:
        strings = [f"string: {literal(quote)} INSIDE {literal(quote)}", "INSIDE: /(?s:.*)/"]
    else:
        strings = [f"string: {literal(quote)} inside", f"inside[lazy]: /(?s:.*){escaped}/"]
    return [
        *strings,
        'anything: string | scalar | "{" (field ("," field)*)? "}" | "[" (anything ("," anything)*)? "]"',
        f"scalar: %json {json.dumps({'type': list(_SCALARS)})}",
        'field: FIELD ":" anything',
        f"FIELD: {_NAME}",
    ]


class QuotedRules:
    def __init__(
        self, name: str, quote: str, literal: Callable[[str], str], warn: Callable[[str], None], *, strict: bool
    ) -> None:
        """warn: called with what does not hold."""
        self._warn = warn
        self._name, self._quote, self._literal, self._strict = name, quote, literal, strict
        self._lines: list[str] = []
        self._references: dict[str, str] = {}

    def lines(self, schema: Mapping[str, Any]) -> list[str]:
        """The rule of this name, and the rules that it uses. Raises ValueError for a schema that cannot hold."""
        self._root = schema
        return [f"{self._name}: {self._value(schema)}", *self._lines]

    def _rule(self, expression: str) -> str:
        name = f"{self._name}_{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            if schema is False:
                raise ValueError("a schema is false, so that no value fulfils it")
            return "anything"
        kinds = schema.get("type")
        is_scalar = kinds in _SCALARS if isinstance(kinds, str) else False
        unknown = [key for key in schema if key not in _NOTES and key not in _HELD and not is_scalar]
        if self._strict and unknown:
            raise ValueError(f"{unknown[0]} does not hold for this model, so the function cannot be strict")
        if unknown:
            self._warn(f"{', '.join(unknown)} does not hold for this model")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._one_of([self._literal(quoted(value, self._quote)) for value in values])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return self._one_of([self._value(inner) for inner in schema[key]])
        if isinstance(kinds, list):
            return self._one_of([self._value({**schema, "type": kind}) for kind in kinds])
        kind = kinds or ("object" if "properties" in schema else "array" if "items" in schema else None)
        if kind is not None and kind not in _TYPES:
            raise ValueError(f"the type {kind!r} is none of JSON's")
        if kind in _SCALARS:
            constraint = {key: value for key, value in schema.items() if key not in _NOTES}
            return self._rule(f"%json {json.dumps(constraint)}")
        return {"string": lambda _: "string", "array": self._array, "object": self._object}.get(
            str(kind), lambda _: "anything"
        )(schema)

    def _one_of(self, choices: list[str]) -> str:
        if not choices:
            raise ValueError("a schema has no choices, so that no value fulfils it")
        return f"({' | '.join(choices)})"

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            target: Any = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                if not isinstance(target, Mapping) or name not in target:
                    raise ValueError(f"$ref has {reference!r}, which the schema does not have")
                target = target[name]
            name = self._references[reference] = f"{self._name}_of{len(self._references)}"
            self._lines.append(f"{name}: {self._value(target)}")
        return self._references[reference]

    def _array(self, schema: Mapping[str, Any]) -> str:
        item, least, most = self._value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        further = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f'{item} ("," {item}){further}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Fields in order; the rule of the fields from one on is written for both, whether others precede it or not."""
        fields = sorted((schema.get("properties") or {}).items(), key=in_order)
        required = set(schema.get("required") or ())
        others = schema.get("additionalProperties", True)
        other = "" if others is False else f'FIELD ":" {self._value(others)}'
        after = {False: f'({other} ("," {other})*)?' if other else '""', True: f'("," {other})*' if other else '""'}
        for name, inner in reversed(fields):
            field = f"{self._literal(name + ':')} {self._value(inner)}"
            rules = {}
            for follows in (False, True):
                taken = f"{field} {after[True]}"
                taken = f'"," {taken}' if follows else taken
                rules[follows] = self._rule(taken if name in required else f"{taken} | {after[follows]}")
            after = rules
        return f'"{{" {after[False]} "}}"'
