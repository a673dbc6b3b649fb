"""Pieces of answers: what they fold into, and how OpenAI's shapes write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polarlm.engine import Engine, SamplingParams, Usage
from polarlm.server.answers.answering import answer
from polarlm.server.answers.pieces import Answer, Call, CallStart, Piece, fold
from polarlm.server.http.openai.chat import ChatWriter
from polarlm.server.http.openai.completions import TextWriter
from polarlm.server.http.openai.shapes import ChoicesWriter
from polarlm.server.reading.parameters import ParsedRequest, read
from tests.server.http_server import serving
from tests.tiny import forget

PROMPT = "the rain"
USAGE = Usage(7, 0, 9, 0.1, 0.2)
PIECES = [
    Piece(reasoning="Let me "),
    Piece(reasoning="see.", text="I ask."),
    Piece(call=CallStart(0, "call_a", "weather")),
    Piece(arguments='{"city": '),
    Piece(arguments='"Rome"}'),
    Piece(call=CallStart(1, "call_b", "time"), arguments="{}"),
    Piece(text="Done.", finish_reason="tool_calls", usage=USAGE),
]
ANSWER = Answer(
    "I ask.Done.",
    "Let me see.",
    (Call("call_a", "weather", '{"city": "Rome"}'), Call("call_b", "time", "{}")),
    (),
    "tool_calls",
    USAGE,
)


def events(kind: type[ChoicesWriter], pieces: list[Piece]) -> list[dict[str, Any]]:
    writer = kind("m", with_usage=False)
    return [event for at, piece in enumerate(pieces) for event in writer.events(0, piece, first=at == 0)]


def test_pieces_fold_into_the_answer() -> None:
    assert fold(PIECES) == ANSWER


def test_a_whole_message_has_the_calls_and_the_reasoning() -> None:
    (choice,) = ChatWriter("m", with_usage=False).whole([ANSWER])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I ask.Done.", "Let me see.")
    assert message["tool_calls"][0] == {
        "id": "call_a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]


def test_a_message_of_calls_alone_has_no_content() -> None:
    alone = fold([Piece(call=CallStart(0, "a", "f"), arguments="{}"), Piece(finish_reason="tool_calls", usage=USAGE)])
    (choice,) = ChatWriter("m", with_usage=False).whole([alone])["choices"]
    assert choice["message"]["content"] is None
    plain = fold([Piece(finish_reason="stop", usage=USAGE)])
    (choice,) = ChatWriter("m", with_usage=False).whole([plain])["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_streamed_calls_have_their_name_once_and_their_number_always() -> None:
    deltas = [event["choices"][0]["delta"] for event in events(ChatWriter, PIECES)]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me "},
        {"reasoning_content": "see.", "content": "I ask."},
        {
            "tool_calls": [
                {"index": 0, "id": "call_a", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}}
            ]
        },
        {"content": "Done."},
        {},
    ]
    assert events(ChatWriter, PIECES)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_streamed_text_of_a_plain_prompt() -> None:
    parts = events(TextWriter, [Piece("a"), Piece(), Piece("b", finish_reason="stop", usage=USAGE)])
    assert [(part["choices"][0]["text"], part["choices"][0]["finish_reason"]) for part in parts] == [
        ("a", None),
        ("b", None),
        ("", "stop"),
    ]


def test_the_last_chunk_has_the_stop_string(tiny: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    forget(tiny)
    free = tiny.generate(PROMPT, params)
    assert "#" not in free.text
    forget(tiny)
    *_, last = tiny.stream(PROMPT, replace(params, stop=("#", free.text[8:10])))
    assert (last.finish_reason, last.stopped_by) == ("stop", free.text[8:10])
    forget(tiny)
    *_, last = tiny.stream(PROMPT, replace(params, stop=("#",)))
    assert (last.finish_reason, last.stopped_by) == ("length", None)


def test_only_a_stop_string_of_the_clients_is_named(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "he ran"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    forget(tiny)
    stop = tiny.chat(messages, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)).text[4:6]

    async def last_of(asked: ParsedRequest) -> Piece:
        return [piece async for piece in answer(server.driver, asked)][-1]

    with serving(tiny) as server:
        forget(tiny)
        assert server.run(last_of(read(body | {"stop": stop}, tiny.tokenize))).stopped_by == stop
        monkeypatch.setattr(tiny.model.template, "stops", (stop,))
        forget(tiny)
        last = server.run(last_of(read(body, tiny.tokenize)))
        assert (last.finish_reason, last.stopped_by) == ("stop", None)
