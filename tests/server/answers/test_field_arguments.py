"""Arguments that are no object, in tags and as in Python: what a template writes is read, streamed and constrained."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.server.answers.call_grammar import Grammar, functions_of
from tests import call_templates
from tests.pairs import in_turn
from tests.server.answers.test_quoted_arguments import LEAST, SCHEMA
from tests.server.http_server import serving
from tests.tool_model import tool_engine

FORMS = (
    *("PARAMETER_TAGS", "KEY_TAGS", "KEY_TAGS_IN_A_LINE", "INVOKE_TAGS", "TYPED_TAGS", "SEED_TAGS", "STEP_TAGS"),
    *("PYTHON", "PYTHON_LINES", "PYTHON_LIST"),
)
PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "is_so": {"type": "boolean"},
    "either": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}, {"type": "integer"}]},
    "tree": {"type": "object", "additionalProperties": True},
    "list": {"type": "array"},
    "free": {"description": "anything"},
}
DEFINED = {"type": "object", "properties": PROPERTIES, "$defs": {"word": {"enum": ["a", "7b"]}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
    for name, parameters in (("write", DEFINED), ("now", {"type": "object", "properties": {}}))
]
PIECES = (
    *("'", '"', "\\", "\n", "[", "]", "{", "}", "(", ")", ", ", "=", ":", " ", "\t", "a", "é", "😀", "7", "True"),
    *("</parameter>", "<parameter=a>", "</arg_value", "<arg_key>", "</tool_call>", "<tool_call>", "\\n", "\\x4", "<|"),
)


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(getattr(call_templates, name), bos_token="<s>", eos_token="</s>")


def some_arguments(chance: random.Random, format: CallFormat) -> dict[str, Any]:
    """Values of every type. No string holds what ends it where nothing in it is escaped."""
    text = "".join(chance.choices(PIECES, k=chance.randrange(9)))
    end = format.quote if format.fields is None else "" if format.fields.quote else format.fields.suffix
    if end and (text + end).index(end) < len(text):
        text = "<"
    values = {
        "text": text,
        "count": chance.randrange(-99, 99),
        "share": chance.choice([0.5, -1e-7, 3]),
        "is_so": chance.random() < 0.5,
        "either": chance.choice(["a", "7b", None, 7]),
        "tree": {"a": [text, None, True], "b" if format.quote else "b c": {}},
        "list": [[], 1.5, text, False],
        "free": chance.choice([None, "some words", 12, [1]]),
    }
    return {name: values[name] for name in values if chance.random() < 0.6}


def parsed(format: CallFormat, *texts: str) -> list[Any]:
    """The text, then (name, arguments) of each call."""
    parser = AnswerParser(format, {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS})
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.finish()
    assert not parser.is_cut_off
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.call is not None:
            calls.append([piece.call.name, ""])
        if piece.arguments:
            calls[-1][1] += piece.arguments
    return ["".join(piece.text for piece in pieces), *((name, json.loads(said)) for name, said in calls)]


def taken(rules: str, text: str) -> bool:
    """Whether a grammar has a text."""
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), rules)
    written = text.encode()
    return matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting()


@in_turn(
    "name written expected",
    [
        ("PYTHON", r""" text="it's \"\x41\u00e9\U0001F600\d",count=7 ,tree={'a':None, "b" :[1,'\'']}""",
         {"text": 'it\'s "Aé😀\\d', "count": 7, "tree": {"a": None, "b": [1, "'"]}}),
        ("PYTHON", "free=nan, is_so=true", {"free": "nan", "is_so": True}),
        ("PARAMETER_TAGS", "<parameter=count>\nseven\n</parameter>\n\n<parameter=text>\n7\n</parameter>\n",
         {"count": "seven", "text": "7"}),
        ("PARAMETER_TAGS", "<parameter=tree>\n{'a': True}\n</parameter>\n<parameter=free>\n[a]\n</parameter>\n",
         {"tree": {"a": True}, "free": "[a]"}),
        ("PARAMETER_TAGS", "<parameter=is_so>\nfalse\n</parameter>\n<parameter=free>\n 7\n</parameter>\n",
         {"is_so": False, "free": " 7"}),
    ],
)  # fmt: skip
def test_what_models_write_otherwise_is_read_as_well(name: str, written: str, expected: Any) -> None:
    format = template_of(name).calls
    text = format.write_calls([("write", written, "")])
    assert parsed(format, text) == parsed(format, *text) == ["", ("write", expected)]


def test_where_calls_have_no_marker_names_tell_them_from_lists() -> None:
    bare = call_templates.PYTHON.replace("<|tool_call_start|>", "").replace("<|tool_call_end|>", "")
    format = ChatTemplate(bare, bos_token="<s>", eos_token="</s>").calls
    rules = Grammar(format, functions_of(TOOLS), {}, "may", several=True).text()
    for text in ("[1, 2]", "[write](there)", "Look: [now()]"):
        assert parsed(format, text) == parsed(format, *text) == [text]
        assert taken(rules, text)
    text = "[now(), write(text='[1]')]"
    assert parsed(format, text) == parsed(format, *text) == ["", ("now", {}), ("write", {"text": "[1]"})]
    assert taken(rules, text)
    assert not taken(rules, "[now(1)]")
    assert parsed(template_of("KEY_TAGS").calls, "A <tool_call> is a tag") == ["A <tool_call> is a tag"]


CHOICE = {**SCHEMA, "properties": {name: SCHEMA["properties"][name] for name in ("tree", "Days", "city", "free")}}


@in_turn(
    "value fits",
    [
        (LEAST, True),
        (LEAST | {"tree": {"name": "x", "next": {"name": "x"}}, "Days": [3, 4, 5], "city": 7}, True),
        (LEAST | {"city": {"b": [True], "a": ""}, "free": {"a": [{"b": "c"}, 1.5, "}"], "d": {}}}, True),
        (LEAST | {"city": None, "note": 'two\nlines, {"a": <|'}, True),
        (LEAST | {"note": False}, True),
        ({"city": "Rome"}, False),
        (LEAST | {"city": "Oslo"}, False),
        (LEAST | {"Days": [2]}, False),
        (LEAST | {"Days": []}, False),
        (LEAST | {"tree": {"name": "x", "other": 1}}, False),
        (LEAST | {"other": 1}, False),
    ],
)
def test_the_grammar_has_the_values_of_the_schema_and_no_others(value: dict[str, Any], fits: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    ordered = {name: value[name] for name in (*SCHEMA["properties"], "other") if name in value}
    for name in FORMS:
        format = template_of(name).calls
        rules = Grammar(format, functions_of(tools), {}, calls="must", several=False).text()
        assert taken(rules, format.write_calls([("f", format.write(ordered), "")])) is fits


@pytest.mark.parametrize("name", ["PARAMETER_TAGS", "KEY_TAGS", "PYTHON"])
def test_calls_of_a_model_fulfil_their_schema(name: str, tmp_path: Path) -> None:
    """Of one where a control token ends any text, too."""
    schema = {**SCHEMA, "required": ["note"]} if name == "KEY_TAGS" else CHOICE
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    seen: set[str] = set()
    with tool_engine(tmp_path, getattr(call_templates, name)) as engine, serving(engine) as server:
        control = engine.model.tokenizer.control_tokens()
        bias = {str(control[mark]): 6 for mark in ("<arg_key>", "</arg_value>") if mark in control}
        for seed in range(8):
            body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": "required"}
            body |= {"logit_bias": bias}
            choice = server.chat(**body, seed=seed, temperature=1, max_tokens=400, parallel_tool_calls=False)
            if choice["finish_reason"] == "length":
                continue
            (call,) = choice["message"]["tool_calls"]
            value = json.loads(call["function"]["arguments"])
            jsonschema.validate(value, schema)
            seen |= set(value)
    assert seen >= ({"note"} if name == "KEY_TAGS" else {"tree", "Days", "city"})
