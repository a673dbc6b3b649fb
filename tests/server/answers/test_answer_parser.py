"""Answers in parts: what is text, reasoning and a call does not depend on how the text comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.engine.parsing.pieces import Piece
from polarlm.engine.sampling.detokenizer import AnswerStops
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.reasoning import Tags
from tests.pairs import in_turn
from tests.server.answers.test_call_arguments import template_of

THINK = Tags("<think>", "</think>")
NAMES = ("weather", "time")
FORMS = ("MISTRAL", "MISTRAL_ARGS", "MISTRAL_IDS", "LLAMA", "HERMES", "NO_TOOLS")
ARGUMENTS = ("{}", '{"city": "Rome"}', '{"a": {"b": ["}", "{\\"", "\\\\"]}, "n": 1.5}')


def merged(pieces: list[Piece]) -> list[Piece]:
    """`pieces` with neighbours of one kind in one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else Piece()
        kinds = [{kind for kind in ("text", "reasoning", "arguments") if getattr(each, kind)} for each in (last, piece)]
        if piece.call is None and last.call is None and kinds[0] == kinds[1] and joined:
            joined[-1] = replace(
                last,
                text=last.text + piece.text,
                reasoning=last.reasoning + piece.reasoning,
                arguments=last.arguments + piece.arguments,
            )
        else:
            joined.append(piece)
    return joined


def parsed(parser: AnswerParser, *texts: str) -> list[tuple[str, str]]:
    """(kind, text) of each part."""
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.finish()
    kinds: list[tuple[str, str]] = []
    for piece in merged(pieces):
        if piece.call is not None:
            assert len(piece.call.id) == 9
            kinds.append(("call", piece.call.name))
        kinds += [(kind, getattr(piece, kind)) for kind in ("reasoning", "text", "arguments") if getattr(piece, kind)]
    return kinds


def parser(format: CallFormat | None = None, tags: Tags | None = None, *, thinks: bool = False) -> AnswerParser:
    return AnswerParser(format, NAMES, ("[TOOL_CALLS]", "[ARGS]"), tags, thinks=thinks)


@pytest.mark.parametrize("name", FORMS)
def test_calls_as_each_family_writes_them(name: str) -> None:
    format = template_of(name).calls
    calls = [("weather", ARGUMENTS[2], "aaaaaaaa1"), ("time", "{}", "bbbbbbbb2")][: 2 if format.has_several else 1]
    written = replace(format, shown_closing=(format.closing,)).write_calls(calls)
    expected = [part for function, arguments, _ in calls for part in (("call", function), ("arguments", arguments))]
    assert parsed(parser(format), written) == expected
    assert parsed(parser(format), *written) == expected
    if name != "LLAMA":
        assert parsed(parser(format), f"I look.\n{written}") == [("text", "I look."), *expected]
    assert parsed(parser(format, THINK), f"<think>\nso\n</think>\n\n{written}") == [("reasoning", "so"), *expected]
    channel = Tags("<|channel>thought", "<channel|>")
    written_in = f"<|channel>thought\nso\n<channel|>\n{written}"
    assert parsed(parser(format, channel), written_in) == [("reasoning", "so"), *expected]
    assert parsed(parser(format, THINK, thinks=True), f"so\n</think>\n\n{written}") == [("reasoning", "so"), *expected]


def test_text_around_calls_is_kept() -> None:
    text = 'Wait.\n\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n Done. \n'
    expected = [("text", "Wait."), ("call", "time"), ("arguments", "{}"), ("text", "Done. \n")]
    assert parsed(parser(template_of("HERMES").calls), text) == expected


@in_turn(
    "text",
    [
        "",
        "  \n ",
        " plain text\n",
        "a <tool_call",
        "<tool_call> is a tag",
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": 5}',
        "<think",
        "and <think>later</think>",
    ],
)
def test_what_is_no_call_and_no_reasoning_is_text(text: str) -> None:
    expected = [("text", text)] if text else []
    for pieces in ([text], list(text)):
        assert parsed(parser(template_of("HERMES").calls, THINK), *pieces) == expected


def test_an_answer_may_end_anywhere() -> None:
    """As it does at the most tokens that it may have."""
    text = '<think>a b</think>Hi <tool_call>\n{"name": "time", "arguments": {"a": 1}}\n</tool_call>'
    for end in range(len(text)):
        parts = dict(parsed(parser(template_of("HERMES").calls, THINK), text[:end]))
        assert "a b</think>".startswith(parts.get("reasoning", ""))
        assert not parts.get("text", "").startswith("<") or parts["text"] == text[:end]
        assert '{"a": 1}'.startswith(parts.get("arguments", ""))


def test_ids_that_the_model_writes_are_those_of_the_calls() -> None:
    (start, *_) = AnswerParser(template_of("MISTRAL_IDS").calls, NAMES).push(
        "[TOOL_CALLS]time[CALL_ID]abcdefgh9[ARGS]{}"
    )
    assert (start.call.id, start.call.name) == ("abcdefgh9", "time")


FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", '{"name": "', "weather", "tim", "e", '", "arguments": ', "{}", '{"a"'),
    *("}", "}\n</tool_call>", "[TOOL_CALLS]", " [", "]", ", ", "[ARGS]", "x", " ", "\n", '"', "\\", ": 1"),
    '", "parameters": ',
    '[TOOL_CALLS] [{"name": "time", "arguments": {}}]',
)
APART = ("PARAMETER_TAGS", "KEY_TAGS", "PYTHON")
APART_FRAGMENTS = (
    *("<tool_call>", "\n<function=", "time", ">\n", "<parameter=", "a", "\n</parameter>\n", "</function>\n"),
    *(
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "\n",
        "<arg_value>",
        "</arg_value>\n",
        "<|tool_call_start|>[",
        "(",
    ),
    *("=", ", ", "'", '"', "\\", "x4", "{", "[", "]", ")", "]<|tool_call_end|>", "7", "None", " ", "<think>"),
)


def texts(fragments: Iterable[str], forms: Iterable[str]) -> st.SearchStrategy[tuple[str, CallFormat]]:
    """A text of such parts and of whole calls, and a form in which to read it."""
    formats = [template_of(name).calls for name in forms]
    calls = [format.write_calls([("time", format.write({"a": "b"}), "")]) for format in formats]
    return st.tuples(
        st.lists(st.sampled_from([*fragments, *calls]), max_size=12).map("".join), st.sampled_from(formats)
    )


@given(
    st.deferred(lambda: texts(FRAGMENTS, FORMS) | texts(APART_FRAGMENTS, APART)),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_the_parts_do_not_depend_on_how_the_text_comes(
    written: tuple[str, CallFormat], tagged: bool, thinks: bool, cuts: list[int]
) -> None:
    text, format = written
    tags = THINK if tagged else None
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = parsed(parser(format, tags, thinks=tagged and thinks), text)
    assert parsed(parser(format, tags, thinks=tagged and thinks), *pieces) == whole
    assert parsed(parser(format, tags, thinks=tagged and thinks), *text) == whole


CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
WHOLE = f"<think>\n\nI <b> it\n\n</think>\n\nNow <b> so.\n\n{CALL}\nIt is"
STOPS: dict[str, tuple[str, str | None]] = {  # a stop string → what of an answer passes before it; None: all of it
    "<b>": (WHOLE, "</think>\n\nNow "),
    "<": (WHOLE, "</think>\n\nNow "),
    "\n\n": (WHOLE, "so."),
    "I": (WHOLE, "</tool_call>\n"),
    "w <b> so.\n": (WHOLE, "No"),
    "think": (WHOLE, None),
    "tool": (WHOLE, None),
    "time": (WHOLE, None),
    "\n\nNow": (WHOLE, None),
    ".\n\n<": (WHOLE, None),  # into a call
    "<tool_call>x": ("Hm <tool_call>x", "Hm "),
    "ol_call>\n{": (f"Hm <tool_call>\n{{{CALL}", "Hm <to"),
    "x": ('{"name": "time", "x": 1}', '{"name": "time", "'),  # what may be another family's call is held to its end
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_is_one_of_the_text_however_it_comes(stop: str) -> None:
    text, before = STOPS[stop]
    end = len(text) if before is None else text.index(before) + len(before)
    for length in (1, 3, len(text)):
        stops = AnswerStops([stop], parser(template_of("HERMES").calls, THINK), {})
        passed, pieces = "", [text[at : at + length] for at in range(0, len(text), length)]
        while pieces and stops.stopped_by is None:
            passed += stops.push(pieces.pop(0))
            assert text[:end].startswith(passed)
        passed += stops.finish(cut=False)
        assert (passed, stops.stopped_by) == (text[:end], None if before is None else stop), length
