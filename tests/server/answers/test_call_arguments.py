"""Calls of tools: as the templates of whole families write them, and arguments that are no JSON, in tags, as in Python
or between quotes of their own; they are read and constrained."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.errors import ConstraintError
from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.engine.parsing.argument_readers import QuotedArguments
from polarlm.model_loaders.chat.call_arguments import quote_value
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.server.answers.call_grammar import Grammar, functions_of
from tests import call_templates
from tests.pairs import in_turn
from tests.server.http_server import serving
from tests.tool_model import tool_engine

FORMS = (
    *("PARAMETER_TAGS", "KEY_TAGS", "KEY_TAGS_IN_A_LINE", "INVOKE_TAGS", "TYPED_TAGS", "SEED_TAGS", "STEP_TAGS"),
    *("PYTHON", "PYTHON_LINES", "PYTHON_LIST"),
)
QUOTE = '<|"|>'
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


@cache
def bytes_as_tokens() -> Any:
    return pytest.importorskip("llguidance").LLTokenizer("byte")


def taken(rules: str, text: str) -> bool:
    """Whether a grammar has a text."""
    matcher = pytest.importorskip("llguidance").LLMatcher(bytes_as_tokens(), rules)
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
        ("GEMMA", "{}", {}),
        ("GEMMA", "{ a : 1 , b:[ ] }", {"a": 1, "b": []}),
        ("GEMMA", "{at:12:30,no:NaN,yes:True,none:None}", {"at": "12:30", "no": "NaN", "yes": True, "none": None}),
        ("GEMMA", '{a:"text",<|"|>b c<|"|>:<|"|>line\nend<|"|>}', {"a": "text", "b c": "line\nend"}),
        ("GEMMA", "{a:Rome}", {"a": "Rome"}),
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


# -- quotes of a model's own -------------------------------------------------------------------------------------------

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


# -- the grammar of a schema -------------------------------------------------------------------------------------------

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
LEAST = {"city": "Rome", "tree": {"name": "x"}}
# A quote that is text, which ends a string wherever it occurs.
QUOTED = CallFormat(opening="call:", middle=("",), closing=";", shown_closing=(";",), quote=QUOTE)


def functions(schema: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def is_in_the_grammar(format: CallFormat, value: dict[str, Any]) -> bool:
    """Whether a call with these arguments may be written where SCHEMA holds."""
    ordered = {name: value[name] for name in (*SCHEMA["properties"], "other") if name in value}
    rules = Grammar(format, functions_of(functions(SCHEMA)), {}, calls="must", several=False).text()
    return taken(rules, format.write_calls([("f", format.write(ordered), "")]))


@in_turn(
    "value fits",
    [
        (LEAST, True),
        (LEAST | {"tree": {"name": "x", "next": {"name": "x", "next": {"name": "x"}}}, "Days": [3, 4, 5]}, True),
        (LEAST | {"city": 7, "note": None}, True),
        (LEAST | {"city": {"b": [True], "a": ""}, "free": {"a": [{"b": "c"}, 1.5, "}"], "d": {}}}, True),
        (LEAST | {"city": None, "note": 'two\nlines, {"a": <|'}, True),
        (LEAST | {"note": False}, True),
        ({"city": "Rome"}, False),
        (LEAST | {"city": "Oslo"}, False),
        (LEAST | {"Days": [2]}, False),
        (LEAST | {"Days": []}, False),
        (LEAST | {"Days": [3, 3, 3, 3]}, False),
        (LEAST | {"tree": {"name": "x", "other": 1}}, False),
        (LEAST | {"other": 1}, False),
    ],
)
def test_the_grammar_has_the_values_of_the_schema_and_no_others(value: dict[str, Any], fits: bool) -> None:
    for format in (*(template_of(name).calls for name in FORMS), QUOTED):
        assert is_in_the_grammar(format, value) is fits, format


@in_turn(
    "pattern fits others",
    [
        (r"b/|[|]", [], []),
        (r"[b|]/", ["ab/\n|", "|/"], ["ab", ""]),
        (r"^a\$", ["a$", "a$\n<"], ["ba$"]),
        (r"(a|\/)\\$", ["ba\\", "/\\"], ["b\\", "a\\ "]),
    ],
)
def test_a_pattern_of_a_strict_function_holds_in_a_string(pattern: str, fits: list[str], others: list[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    strict = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    for format in (QUOTED, *(template_of(name).calls for name in FORMS if not name.startswith("PYTHON"))):
        if not fits:  # each alternative has anchors of its own
            with pytest.raises(ConstraintError, match="pattern does not hold"):
                Grammar(format, functions_of(strict), {}, calls="must", several=False).text()
        for text in (*fits, *others):
            rules = Grammar(format, functions_of(strict), {}, calls="must", several=False).text()
            assert taken(rules, format.write_calls([("f", format.write({"a": text}), "")])) is (text in fits), text


def test_a_number_is_no_string_where_strings_have_quotes() -> None:
    for format in (QUOTED, template_of("PYTHON").calls):
        assert not is_in_the_grammar(format, LEAST | {"note": 5})


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x|y"}}}, "pattern does not hold"),
        ({"type": "object", "properties": {"a": {"$ref": "#/no"}}}, "#/no"),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "nothing fulfils it"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "none of JSON's"),
    ],
)
def test_a_schema_that_cannot_hold_is_refused(schema: Any, sentence: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    with pytest.raises(ConstraintError, match=sentence):
        Grammar(CallFormat(quote=QUOTE), functions_of(tools), {}, calls="must", several=True).text()


@pytest.mark.parametrize("text", [(), (QUOTE, "<|tool_call>", "<tool_call|>")], ids=["GEMMA", "GEMMA as text"])
def test_calls_of_a_model_fulfil_their_schema(text: tuple[str, ...], tmp_path: Path) -> None:
    """Where a control token ends any text, too. text: names of tokens that are text. Others: test_schemas_of_calls."""
    called: set[str] = set()
    with tool_engine(tmp_path, call_templates.GEMMA, text) as engine, serving(engine) as server:
        bias = {str(engine.tokenize(token, control=True)[0]): 100 for token in ("<|tool_call>", QUOTE)}
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": functions(SCHEMA)}
        body |= {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "logit_bias": bias}
        for seed in range(24):
            choice = server.chat(**body, seed=seed, max_tokens=400)
            if choice["finish_reason"] == "length":
                continue
            (call,) = choice["message"]["tool_calls"]
            value = json.loads(call["function"]["arguments"])
            jsonschema.validate(value, SCHEMA)
            assert list(value) == sorted(value, key=str.lower)
            called |= set(value)
            if seed > 6 and called >= {"tree", "Days", "city", "note"}:
                break
    assert called >= {"tree", "Days", "city", "note"}


# -- forms of whole families of models -------------------------------------------------------------------------

OBJECTS = (  # forms whose arguments are an object, mostly JSON
    *("HERMES", "MISTRAL", "MISTRAL_ARGS", "MISTRAL_IDS", "LLAMA", "TEXT_ARGUMENTS", "GEMMA", "GEMMA_OF_APRIL"),
    *("DEEPSEEK", "DEEPSEEK_SHORT", "KIMI", "GRANITE", "PHI", "NEMOTRON", "JAMBA", "XLAM", "FIREFUNCTION"),
    *("INTERNLM", "APERTUS", "HUNYUAN", "FUNCTION_TAGS", "MINIMAX", "COMMAND_R", "FALCON", "LONGCAT", "EXAONE"),
    *("GIGACHAT", "SOLAR", "COMMAND", "TYPED_CALLS"),
)
CALLS_ALONE = ("HERMES", "MISTRAL", "LLAMA", "GEMMA", "GEMMA_OF_APRIL")  # templates that write no text before calls


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FORMS, *OBJECTS])
def test_what_a_template_writes_is_described_read_and_in_the_grammar(name: str, count: int) -> None:
    """Conversations by a seed, with texts that look like tags, quotes and brackets."""
    template, chance = template_of(name), random.Random(name)
    format = template.calls
    assert format.is_native
    for part in (format.begin, format.closing, format.call_separator, format.end):  # control tokens are whole
        assert part.count("<") == part.count(">"), part
    has_text = format.marker(()) and name not in CALLS_ALONE
    conversations, contents = [], []
    for _ in range(count):
        called = [("write", some_arguments(chance, format)), ("now", {}), ("now", {})][:: chance.choice([1, -1])]
        calls = [
            {
                "id": f"abcdefgh{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(value, ensure_ascii=False)},
            }
            for number, (name, value) in enumerate(called[: chance.choice([2, 3]) if format.has_several else 1])
        ]
        contents.append(chance.choice(["", "I look."]) if has_text else "")
        said = {"role": "assistant", "content": contents[-1], "tool_calls": calls}
        conversations.append(format.as_messages([{"role": "user", "content": "Hi"}, said]))
    rules = [Grammar(format, functions_of(TOOLS), {}, calls, several=True).text() for calls in ("must", "may")]
    texts = template.render_each(conversations, tools=TOOLS)
    for text, content, (_, said) in zip(texts, contents, conversations, strict=True):
        calls, expected = [], [content]
        for call in said["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            expected.append((name, json.loads(arguments) if format.arguments_as_text else arguments))
            calls.append((name, arguments if format.arguments_as_text else format.write(arguments), call["id"]))
        shown = format.write_calls(calls)
        assert isinstance(text, str)
        assert text.count(shown) == 1
        head = text.partition(shown)[0]
        answer = content + head.rpartition(content)[2] if content else ""
        model = replace(format, shown_closing=(format.closing,))  # which does not write ids behind arguments
        written = model.write_calls(calls)
        answer += written
        places = sorted({0, len(answer), *(chance.randrange(len(answer)) for _ in range(8))})
        for pieces in ([answer], [answer[a:b] for a, b in pairwise(places)], answer):
            assert parsed(format, *pieces) == expected
        assert taken(rules[0], written)
        assert taken(rules[1], answer)
