"""Custom tools with OpenAI's own client: their input is text that parses, in the call format of every family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import Usage
from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.engine.parsing.pieces import CallStart, Piece, fold
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.server.answers.call_grammar import Grammar, channel_grammar, functions_of
from polarlm.server.answers.custom_calls import CustomCalls
from polarlm.server.http.warnings import HEADER
from polarlm.server.reading.tools import read_tools
from tests import call_templates
from tests.pairs import in_turn
from tests.server.answers.test_call_arguments import FORMS, OBJECTS, taken, template_of
from tests.server.answers.test_http_tools import FAMILIES, at_once
from tests.server.http_server import Serving, serving
from tests.tool_model import tool_engine

CODEX = Path(__file__).resolve().parents[2] / "fixtures" / "clients" / "codex.json"
PATCHES = next(
    tool["format"]["definition"]
    for tool in json.loads(CODEX.read_text(encoding="utf-8"))["requests"][-1]["body"]["tools"]
    if tool["type"] == "custom"
)
LINE = r"(?:[-+ ].*|@@(?: .+)?)\n"
HUNK = (
    r"\*\*\* (?:Add File: .+\n(?:\+.*\n)+|Delete File: .+\n"
    rf"|Update File: .+\n(?:\*\*\* Move to: .+\n)?(?:(?:{LINE})+(?:\*\*\* End of File\n)?)?)"
)
PATCH = (
    "*** Begin Patch\n*** Update File: a/b.py\n@@ def f():\n-\ta = \"\\n\"\n+\ta = 'é😀' </parameter\n*** End Patch\n"
)
WRONG = [PATCH.replace("-\t", "\t"), PATCH.replace("@@ d", "@@d"), PATCH.replace("*** B", "** B"), PATCH + "x", ""]


def is_patch(text: str) -> bool:
    return re.fullmatch(rf"\*\*\* Begin Patch\n(?:{HUNK})+\*\*\* End Patch\n?", text) is not None


def custom(name: str, syntax: str = "", definition: str = "") -> Any:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    format = grammar if syntax else {"type": "text"}
    return {"type": "custom", "custom": {"name": name, "description": "Edits.", "format": format}}


PATCHING = custom("apply_patch", "lark", PATCHES)
END = Piece(finish_reason="tool_calls", usage=Usage(0, 0, 0, 0, 0))
FUNCTION = {"type": "function", "function": {"name": "now"}}
CHOICE: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
SHORT = PATCHES.replace("(.+)", ".{1,9}").replace("(.*)", ".{0,9}")  # lines that end, whatever the model wants
FLAT = {"type": "custom", **PATCHING["custom"], "format": {"type": "grammar", "syntax": "lark", "definition": SHORT}}
QUESTION: Any = {"role": "user", "content": "Please"}


def callable_tools(*tools: Any) -> Any:
    read = read_tools({"messages": [], "tools": list(tools)})
    assert read is not None
    return read.callable


def as_clients_get_it(format: CallFormat, text: str) -> list[Any]:
    """The calls in an answer that comes in single characters."""
    schemas = {function.name: function.schema for function in functions_of(callable_tools(PATCHING, FUNCTION))}
    parser, custom_calls = AnswerParser(format, schemas), CustomCalls({"apply_patch"})
    pieces = [custom_calls.convert(piece) for one in text for piece in parser.push(one)]
    return [call.to_json() for call in fold([*pieces, *parser.finish(), END]).calls]


@pytest.mark.parametrize("name", [*FORMS, *OBJECTS])
def test_a_patch_is_in_the_grammar_of_calls_and_nothing_else_is(name: str) -> None:
    """And clients get its text, without the quotes and escapes of the call's format."""
    format = template_of(name).calls
    rules = Grammar(format, functions_of(callable_tools(PATCHING, FUNCTION)), {}, "must", several=False).text()
    for patch in (PATCH, PATCH[:-1], *WRONG):
        written = format.write({"input": patch})
        if format.fields is not None and format.fields.quote == "'":
            written = written.replace(format.fields.value(patch), json.dumps(patch, ensure_ascii=False))
        id = format.call_id("apply_patch", "0") if format.id_form else "abcdefgh0"
        text = replace(format, shown_closing=(format.closing,)).write_calls([("apply_patch", written, id)])
        assert taken(rules, text) is is_patch(patch) is (patch not in WRONG)
        if is_patch(patch):
            (call,) = as_clients_get_it(format, text)
            assert (call["type"], call["custom"]) == ("custom", {"name": "apply_patch", "input": patch})


def test_a_patch_in_channels() -> None:
    template = ChatTemplate(call_templates.GPT_OSS, bos_token="", eos_token="")
    assert template.channels is not None
    rules = channel_grammar(template.channels, template.calls, functions_of(callable_tools(PATCHING)), {}, calls="must")
    head = "<|start|>assistant<|channel|>commentary to=functions.apply_patch json<|message|>"
    for patch in (PATCH, *WRONG):
        text = head.removeprefix("<|start|>assistant") + json.dumps({"input": patch}, ensure_ascii=False)
        assert taken(rules, text) is (patch not in WRONG)


@given(st.text(max_size=8), st.booleans(), st.text(max_size=3))
def test_the_text_of_an_input_comes_in_whole_characters(text: str, is_ascii: bool, space: str) -> None:
    json_text = json.dumps({"input": text}, ensure_ascii=is_ascii)
    custom_calls = CustomCalls({"f"})
    pieces = [Piece(call=CallStart(0, "i", "f")), *(Piece(arguments=one) for one in json_text)]
    said = [custom_calls.convert(piece) for piece in pieces]
    assert "".join(piece.arguments for piece in said) == text
    assert all(piece.is_custom and len(piece.arguments) < 2 for piece in said)


@in_turn(
    "arguments expected",
    [
        ('{"input": "a\\ud83d b\\q"}', "a\ufffd bq"),
        ('{"input": "a\\nb\\u00', "a\nb"),
        ('{"other": "a\\n"}', '{"other": "a\\n"}'),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_what_no_grammar_lets_through_is_no_error(arguments: str, expected: str) -> None:
    custom_calls = CustomCalls({"f"})
    custom_calls.convert(Piece(call=CallStart(0, "i", "f")))
    assert "".join(custom_calls.convert(Piece(arguments=one)).arguments for one in arguments) == expected
    assert custom_calls.convert(Piece(call=CallStart(1, "i", "g"), arguments="{}")).arguments == "{}"


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["qwen3", "MISTRAL_IDS", "GEMMA", "PARAMETER_TAGS", "PYTHON", "gpt-oss"], scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("model")
    with tool_engine(folder, FAMILIES[request.param]) as engine, serving(engine) as server:
        yield server


def fields(server: Serving, seed: int) -> dict[str, Any]:
    """What a model of random weights needs so that its lines, and the patch, end."""
    body = at_once(server)
    bias = {**dict.fromkeys(("\n", "\\", "n", "*"), 12), "E": 8, **body["logit_bias"]}
    return {"temperature": 1, "extra_body": {**body, "logit_bias": bias, "seed": seed, "max_tokens": 900}}


def chat_answer(server: Serving, seed: int) -> tuple[Any, Any]:
    """An answer, whole and streamed, whose only call is the same; and the call."""
    create = server.openai.chat.completions.create
    more: Any = {"model": "any", "messages": [QUESTION], "tools": [FUNCTION, PATCHING], "tool_choice": CHOICE}
    more |= fields(server, seed)
    answer = create(**more)
    whole = answer.choices[0]
    call = whole.message.tool_calls[0]
    said = [choice for chunk in create(**more, stream=True) for choice in chunk.choices]
    deltas = [one for choice in said for one in choice.delta.tool_calls or ()]
    assert (whole.finish_reason, said[-1].finish_reason) == ("tool_calls", "tool_calls")
    assert (call.type, deltas[0].type) == ("custom", "custom")
    assert deltas[0].custom["name"] == call.custom.name == "apply_patch"
    assert "".join(one.custom["input"] for one in deltas) == call.custom.input
    assert len(deltas) > 9
    return answer, call


def test_a_patch_of_any_model_parses_in_chats(family: Serving) -> None:
    for seed in range(2):
        answer, call = chat_answer(family, seed)
        assert is_patch(call.custom.input)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Done"}
    later = family.openai.chat.completions.create(
        model="any",
        messages=[QUESTION, answer.choices[0].message.to_dict(), result],
        tools=[FUNCTION, PATCHING],
        tool_choice="none",
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    usage, cached = answer.usage, later.usage.prompt_tokens_details.cached_tokens
    assert (usage.prompt_tokens + usage.total_tokens) / 2 < cached  # the call is found as the model wrote it


def test_a_patch_in_responses_is_an_item_and_its_output_is_read(hermes: Serving) -> None:
    create = hermes.openai.responses.create
    more: Any = {"model": "any", "input": [QUESTION], "tools": [FLAT, {"type": "function", "name": "now"}]}
    more |= {"tool_choice": {"type": "custom", "name": "apply_patch"}, "temperature": 1, "extra_body": {"seed": 1}}
    whole = create(**more)
    item = whole.output[-1]
    assert (item.type, item.name, item.status) == ("custom_tool_call", "apply_patch", "completed")
    assert whole.tool_choice.to_dict() == more["tool_choice"]
    assert is_patch(item.input)
    events = list(create(**more, stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    ended = [event.item for event in events if event.type == "response.output_item.done"][-1]
    assert "".join(deltas) == done.input == ended.input == events[-1].response.output[-1].input == item.input
    assert done.item_id == ended.id
    assert len(deltas) > 9
    output = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Done"}
    later = create(
        **{**more, "input": [QUESTION, item.to_dict(), output], "tool_choice": "none", "max_output_tokens": 1}
    )
    assert whole.usage.total_tokens - 9 < later.usage.input_tokens_details.cached_tokens


def test_an_input_that_is_cut_off_is_incomplete(hermes: Serving) -> None:
    """Of a tool in a namespace, which may be called alone."""
    space: Any = {"type": "namespace", "name": "files", "description": "", "tools": [{**FLAT, "name": "patch"}]}
    named = {"type": "custom", "namespace": "files", "name": "patch"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    more: Any = {"tools": [{"type": "function", "name": "now"}, space], "tool_choice": choice, "max_output_tokens": 90}
    response = hermes.openai.responses.create(model="any", input="Please", **more)
    call = response.output[-1]
    assert (call.type, call.name, call.namespace) == ("custom_tool_call", "patch", "files")
    assert call.status == response.status == "incomplete"
    assert call.input.startswith("*** Begin Patch\n***")
    assert response.tool_choice.to_dict() == choice


def test_other_apis_have_calls_of_functions(hermes: Serving) -> None:
    words = custom("say", "regex", '^[ab]"?c$')
    body = {
        "messages": [QUESTION],
        "stream": False,
        "tools": [words],
        "tool_choice": "required",
        "options": {"seed": 1},
    }
    call = hermes.post("/api/chat", body).json()["message"]["tool_calls"][0]["function"]
    assert (call["name"], call["arguments"]["input"].replace('"', "")[1:]) == ("say", "c")


def test_the_model_reads_how_an_input_looks(hermes: Serving) -> None:
    body = {"messages": [QUESTION], "tools": [PATCHING, custom("say", "regex", "[ab]+"), custom("free")]}
    prompt = hermes.post("/apply-template", body).json()["prompt"]
    tools = json.loads(prompt.partition("<tools>")[2].partition("</tools>")[0])
    assert [tool["function"]["description"] for tool in tools] == [
        f"Edits.\n\nThe input must match this Lark grammar:\n{PATCHES.rstrip()}",
        "Edits.\n\nThe input must match this regular expression:\n[ab]+",
        "Edits.",
    ]
    assert "pattern" not in prompt


def test_a_recursive_grammar_does_not_hold_and_a_warning_says_so(hermes: Serving) -> None:
    nested = custom("nest", "lark", 'start: "(" start? ")"')
    response = hermes.post("/v1/chat/completions", {"messages": [QUESTION], "tools": [nested], "max_tokens": 1})
    assert response.headers[HEADER] == "the grammar of the tool nest does not hold: it is recursive, or very long"


@in_turn(
    "tool param sentence",
    [
        (custom("f", "lark", "start: a"), "tools[0].custom.format.grammar.definition", "a is not defined"),
        (custom("f", "ebnf", "a"), "tools[0].custom.format.grammar.syntax", "lark or regex"),
        (custom("f", "regex", "(a"), "tools", "The grammar of the tool f cannot be used: unclosed group"),
        (custom("f", "regex", "(?=a)a"), "tools", "look-around"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name", "a string"),
        ({"type": "custom"}, "tools[0].custom", "an object with a name"),
    ],
)
def test_a_wrong_tool_is_a_bad_request(hermes: Serving, tool: Any, param: str, sentence: str) -> None:
    error = hermes.refused("/v1/chat/completions", {"messages": [QUESTION], "tools": [tool]})
    assert error["param"] == param
    assert sentence in error["message"]
    if sentence == "a is not defined":
        flat = {**FLAT, "format": {"type": "grammar", **tool["custom"]["format"]["grammar"]}}
        error = hermes.refused("/v1/responses", {"input": "Please", "tools": [{"type": "web_search"}, flat]})
        assert error["param"] == "tools[1].format.definition"
