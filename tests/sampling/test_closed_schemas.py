"""What JSON schemas stand for beside the standard's words: objects are closed, and unknown keywords passed over."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from polarlm.engine import EngineError, SamplingParams
from polarlm.engine.sampling.constraints import allowed_bits
from polarlm.engine.sampling.grammars import Grammars
from polarlm.engine.schemas.preparation import STRICT, prepare

NUMBER = {"type": "integer"}
A = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]}
OPEN = {**A, "additionalProperties": True}


def is_answer(grammars: Grammars, schema: dict[str, Any] | str, text: str) -> bool:
    """Whether a text may be the whole answer under a schema."""
    constraint = grammars.constraint(SamplingParams(schema=schema))
    tokenizer = grammars._tokenizer
    for token in tokenizer.tokenize(text, continued=True):
        mask = constraint.allowed()
        if constraint.finished or mask is None or not allowed_bits(mask, tokenizer.vocab_size)[token]:
            return False
        constraint.accept(token)
    return constraint.finished or bool(constraint.matcher.is_accepting())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("schema", "text", "may"),
    [
        (A, '{"a":1}', True),
        (A, '{"a":1,"b":2}', False),
        (OPEN, '{"a":1,"b":2}', True),
        ({**A, "additionalProperties": NUMBER}, '{"a":1,"b":2}', True),
        ({**A, "additionalProperties": NUMBER}, '{"a":1,"b":"2"}', False),
        ({"type": "object"}, '{"a":1}', True),
        ({"properties": {"x": A}}, '{"x":{"a":1,"b":2}}', False),
        ({"type": "array", "items": A}, '[{"a":1,"b":2}]', False),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, '{"a":1,"b":2}', False),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}], "title": "T"}, '{"a":1,"b":2}', False),
        ({"anyOf": [A, B]}, '{"b":1}', True),
        ({"anyOf": [A, B]}, '{"b":1,"c":2}', False),
        ({"allOf": [A, B]}, '{"a":1,"b":2}', True),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, '{"a":1,"b":2}', True),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A", **B}, '{"a":1,"b":2}', True),
        ({"properties": {"a": NUMBER, "b": NUMBER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "{}", False),
        ({"type": "object", "properties": {}, "required": ["a"]}, '{"a":1}', True),
        ({"type": "object", "patternProperties": {"^x": NUMBER}}, '{"x1":1}', True),
        ({"type": "object", "patternProperties": {"^x": NUMBER}}, '{"y1":1}', False),
        ({"enum": [{"properties": {"a": 1}}]}, '{"properties":{"a":1}}', True),
    ],
)
def test_objects_have_the_properties_that_are_listed(
    grammars: Grammars, schema: dict[str, Any], text: str, may: bool
) -> None:
    assert is_answer(grammars, schema, text) == may
    assert is_answer(grammars, json.dumps(schema), text) == may


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({**A, "additionalProperties": None, "$defs": None, "$ref": None, "anyOf": None, "allOf": []}, A),
        ({**A, "type": "", "required": None, "properties": None}, {}),
        ({"type": "object", "properties": [], "required": ""}, {"type": "object"}),
        ({"properties": {"required": None}}, {"properties": {"required": True}}),
        ({"properties": {"x": {**A, "required": None}}}, {"properties": {"x": {**A, "required": []}}}),
        ({"items": {"enum": None, "minLength": None, "pattern": ""}}, {"items": {}}),
        ({"items": [None, A]}, {"items": [True, A]}),
        ({"anyOf": [A, None]}, {"anyOf": [A]}),
        ({"oneOf": [None]}, {}),
        ({**A, "required": ["a", None]}, A),
        ({"type": ["string", None]}, {"type": ["string", "null"]}),
    ],
)
def test_null_in_a_schema_is_as_good_as_absent(schema: dict[str, Any], same: dict[str, Any]) -> None:
    assert prepare(schema, {}) == prepare(same, {})
    values = {"const": None, "enum": [None], "default": None, "examples": [None]}
    assert prepare({"items": values}, {})["items"] == {"enum": [None]}


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": ({"type": "array", "items": NUMBER, "uniqueItems": True}, "[1,1]"),
    "propertyNames": ({"type": "object", "propertyNames": {"enum": ["k"]}, "additionalProperties": NUMBER}, '{"k":1}'),
    "not": ({"type": "integer", "not": {"const": 3}}, "4"),
    "contains": ({"type": "array", "items": NUMBER, "contains": {"const": 1}}, "[1]"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
    "dependentRequired": ({**A, "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
    "if": ({"type": "integer", "if": {"minimum": 1}, "then": {"maximum": 5}}, "1"),
    "format": ({"type": "string", "format": "password"}, '"a"'),
    "look-around|pattern": ({"type": "string", "pattern": "^(?!a)[a-c]+$"}, '"bc"'),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_keywords_that_are_not_supported_are_passed_over(grammars: Grammars, name: str) -> None:
    """They are named, each time."""
    schema, text = UNKNOWN[name]
    assert is_answer(grammars, {**schema, "title": name}, text)
    for _ in range(2):
        told = list[str]()
        grammars.constraint(SamplingParams(schema={**schema, "title": name}), warn=told.append)
        assert re.match(f"the constraint holds in part: .*({name})", "; ".join(told))


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_strict_schema_must_have_none_of_them(grammars: Grammars, name: str) -> None:
    """The error names the keyword, and none of llguidance's options."""
    schema, _ = UNKNOWN[name]
    with pytest.raises(EngineError, match=f"The JSON schema cannot be used: .*{name}") as caught:
        grammars.constraint(SamplingParams(schema={**schema, **STRICT}))
    assert "Enable" not in str(caught.value)
    assert "coerce" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ('{"a":1}', True),
        ('{"a": 1}', True),
        ('{\n  "a": 1\n}', True),
        ('{\n\t"a": 1\n}', True),
        ('{"a":\n\n1}', False),
        ('{"a":  1}', False),
        ('{"a":' + "\n" + " " * 60 + "1}", False),
    ],
)
def test_white_space_is_that_of_printed_json(grammars: Grammars, text: str, may: bool) -> None:
    assert is_answer(grammars, A, text) == may
    for indent in (None, 1, 2, 4):
        assert is_answer(grammars, {}, json.dumps({"a": [1, {"b": [{"c": 2}]}]}, indent=indent))


LINK = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {**LINK, "required": ["next"]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "properties": {"x": {"allOf": [{"$ref": "#"}]}}, "required": ["x"]},
    ],
)
def test_what_would_hold_itself_without_end_is_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="The JSON schema cannot be used: nothing fulfils it"):
        grammars.constraint(SamplingParams(schema=schema))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (LINK, '{"next":{}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
        (
            {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["next"],
            },
            '{"next":{"next":null}}',
        ),
        ({"properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "5"),
    ],
)
def test_what_holds_others_of_its_kind_may_end(grammars: Grammars, schema: dict[str, Any], text: str) -> None:
    assert is_answer(grammars, schema, text)
