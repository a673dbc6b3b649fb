"""Calls in another family's form: they are read where they can be nothing else, however the text comes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.model_loaders.chat.call_format import CallFormat
from tests.pairs import in_turn
from tests.server.answers.test_call_arguments import template_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = {"weather": SCHEMA, "time": {"type": "object"}}
FORMS = ("MISTRAL_ARGS", "HERMES", "GEMMA")
ROME = '{"city": "Rome", "days": 2}'
CALL = f'{{"name": "weather", "arguments": {ROME}}}'
TAGS = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"


def parsed(format: CallFormat, *texts: str) -> tuple[str, list[tuple[str, object]]]:
    """The text and the calls of an answer."""
    parser = AnswerParser(format, TOOLS)
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.finish()
    names = [piece.call.name for piece in pieces if piece.call is not None]
    arguments = [json.loads(piece.arguments) for piece in pieces if piece.arguments]
    assert parser.calls == len(names)
    return "".join(piece.text for piece in pieces), list(zip(names, arguments, strict=True))


@in_turn(
    "answer text calls",
    [
        (CALL, "", 1),
        (f"```json\n{CALL}\n```", "", 1),
        (f"```\n[{CALL}, {CALL}]```\n", "", 2),
        (json.dumps({"name": "weather", "parameters": ROME}), "", 1),
        (f"<tool_call>{CALL}</tool_call>", "", 1),
        (f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "I look.", 2),
        (f"<tool_call>\n{TAGS}\n</tool_call> Done.", "Done.", 1),
        (f"<tool_call>\n{TAGS}", "", 1),
        (f"```py\nx = 1\n```\n<tool_call>{CALL}</tool_call>", "```py\nx = 1\n```", 1),
    ],
)
def test_a_call_that_can_be_nothing_else_is_read(answer: str, text: str, calls: int) -> None:
    for name in FORMS:
        if name == "HERMES" and "<tool_call>" in answer:  # its own form, which it writes as its template does
            continue
        for pieces in ([answer], answer):
            assert parsed(template_of(name).calls, *pieces) == (text, [("weather", json.loads(ROME))] * calls)


@in_turn(
    "answer",
    [
        f"So:\n```json\n{CALL}\n```",  # an example in an answer
        f"```json\n{CALL}\n```\nThat is how.",
        f"```\n<tool_call>{CALL}</tool_call>\n```",
        f"Write <tool_call>{CALL}</tool_call> for it.",
        '{"name": "weather"}',
        '{"name": "weather", "arguments": 7}',
        '{"name": "weather", "arguments": {}, "why": "that"}',
        '{"name": "storm", "arguments": {}}',
        '<tool_call>{"name": "storm", "arguments": {}}</tool_call>',
        "<tool_call>\n<function=storm>\n</function>\n</tool_call>",
        '{"name": "weather", "arguments": {"city": "Ro',
        "```json\n[1, 2]\n```",
        "[1, 2]",
    ],
)
def test_what_may_be_something_else_is_text(answer: str) -> None:
    for format in (template_of("MISTRAL_ARGS").calls, template_of("GEMMA").calls):
        for pieces in ([answer], answer):
            assert parsed(format, *pieces) == (answer, [])


@pytest.mark.parametrize("name", FORMS)
@given(
    st.lists(
        st.sampled_from([CALL, "<tool_call>", "</tool_call>", "```json\n", "```", "\n", " ", "a", "{", "[", TAGS]),
        max_size=7,
    ),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_however_the_text_comes(name: str, parts: list[str], cuts: list[int]) -> None:
    answer = "".join(parts)
    places = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    format = template_of(name).calls
    expected = parsed(format, answer)
    assert parsed(format, *(answer[a:b] for a, b in pairwise(places))) == expected
    assert parsed(format, *answer) == expected


def test_without_functions_nothing_is_a_call() -> None:
    parser = AnswerParser(template_of("GEMMA").calls, {})
    assert "".join(piece.text for piece in [*parser.push(CALL), *parser.finish()]) == CALL
