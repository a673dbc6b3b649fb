"""Arguments between quotes of the model's own: their JSON, and the grammar of a schema's values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.errors import ConstraintError
from polarlm.engine.parsing.argument_readers import QuotedArguments
from polarlm.model_loaders.chat.call_arguments import quote_value
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.server.answers.call_grammar import Grammar, functions_of
from tests.call_templates import GEMMA
from tests.pairs import in_turn
from tests.server.http_server import serving
from tests.tool_model import tool_engine

QUOTE = '<|"|>'
TEXTS = st.text(max_size=12).filter(lambda text: "<|" not in text and not text.endswith("<"))
NAMES = st.text("abcXYZ_-é", min_size=1, max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def read(*texts: str) -> tuple[str, str | None]:
    """(all of the JSON text, what follows the arguments)."""
    reader, said, rest = QuotedArguments(QUOTE), "", None
    for text in texts:
        part, rest = reader.push(text)
        said += part
    return said, rest


@given(st.dictionaries(NAMES, VALUES, max_size=3), st.integers(1, 5))
def test_json_of_what_a_template_writes(value: dict[str, Any], size: int) -> None:
    text = quote_value(value, QUOTE)
    said, rest = read(text + "<tool_call|>")
    assert (json.loads(said), rest) == (value, "<tool_call|>")
    assert read(*(text[at : at + size] for at in range(0, len(text), size))) == (said, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", {}),
        ("{ a : 1 , b:[ ] }", {"a": 1, "b": []}),
        ("{at:12:30,no:NaN,yes:True,none:None}", {"at": "12:30", "no": "NaN", "yes": True, "none": None}),
        ('{a:"text",<|"|>b c<|"|>:<|"|>line\nend<|"|>}', {"a": "text", "b c": "line\nend"}),
        ("{a:Rome}", {"a": "Rome"}),
    ],
)
def test_what_models_write_otherwise_is_read_as_well(text: str, expected: Any) -> None:
    said, rest = read(text)
    assert (json.loads(said), rest) == (expected, "")


SCHEMA = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/node"},
        "Days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 3, "maximum": 5},
            "minItems": 1,
            "maxItems": 3,
        },
        "city": {"enum": ["Rome", 7, None, {"b": [True], "a": ""}]},
        "note": {"anyOf": [{"type": "string"}, {"type": ["null", "boolean"]}]},
        "free": {"type": "object"},
    },
    "required": ["city", "tree"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"const": "x"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("text", [(), (QUOTE, "<|tool_call>", "<tool_call|>")], ids=["control tokens", "text"])
def test_calls_fulfil_their_schema(text: tuple[str, ...], tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    seen: set[str] = set()
    with tool_engine(tmp_path, GEMMA, text) as engine, serving(engine) as server:
        begin, quote = (engine.tokenize(name, control=True)[0] for name in ("<|tool_call>", QUOTE))
        bias = {str(begin): 100, str(quote): 100}
        for seed in range(24):
            body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": "required"}
            body |= {"seed": seed, "temperature": 1, "max_tokens": 300, "logit_bias": bias}
            choice = server.chat(**body, parallel_tool_calls=False)
            if choice["finish_reason"] == "length":
                continue
            (call,) = choice["message"]["tool_calls"]
            value = json.loads(call["function"]["arguments"])
            jsonschema.validate(value, SCHEMA)
            assert list(value) == sorted(value, key=str.lower)
            seen |= set(value)
    assert seen >= {"tree", "Days", "city", "note"}


LEAST = {"city": "Rome", "tree": {"name": "x"}}


@in_turn(
    "value fits",
    [
        (LEAST, True),
        (LEAST | {"tree": {"name": "x", "next": {"name": "x", "next": {"name": "x"}}}}, True),
        (LEAST | {"city": {"a": "", "b": [True]}, "Days": [3, 4, 5], "note": None}, True),
        (LEAST | {"note": 'two\nlines, {"a": <|', "free": {"a": [{"b": "c"}, 1.5, "}"], "d": {}}}, True),
        ({"city": "Rome"}, False),
        (LEAST | {"city": "Oslo"}, False),
        (LEAST | {"Days": []}, False),
        (LEAST | {"Days": [2]}, False),
        (LEAST | {"Days": [3, 3, 3, 3]}, False),
        (LEAST | {"note": 5}, False),
        (LEAST | {"tree": {"name": "x", "other": 1}}, False),
        (LEAST | {"other": 1}, False),
    ],
)
def test_the_grammar_has_the_values_of_the_schema_and_no_others(value: Any, fits: bool) -> None:
    """Where the quote is text, which ends a string wherever it occurs."""
    llguidance = pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    format = CallFormat(opening="call:", middle=("",), closing=";", quote=QUOTE)
    rules = Grammar(format, functions_of(tools), {}, calls="must", several=False).text()
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), rules)
    written = f"call:f{quote_value(value, QUOTE)};".encode()
    taken = matcher.try_consume_tokens(list(written))
    assert (taken == len(written) and matcher.is_accepting()) is fits


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern does not hold"),
        ({"type": "object", "properties": {"a": {"$ref": "#/no"}}}, "#/no"),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "no choices"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "none of JSON's"),
    ],
)
def test_a_schema_that_cannot_hold_is_refused(schema: Any, sentence: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    with pytest.raises(ConstraintError, match=sentence):
        Grammar(CallFormat(quote=QUOTE), functions_of(tools), {}, calls="must", several=True).text()
