"""The shapes of answers that reason and call tools, piece by piece and whole, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from polarlm.engine import Usage
from polarlm.server.answers.pieces import CallStart, Piece, fold
from polarlm.server.http.dialects import anthropic, ollama, responses
from polarlm.server.http.dialects._response_events import ResponseWriter
from polarlm.server.reading.messages import read_messages
from tests.lazily import openai

USAGE = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=7, prefill_seconds=1, generation_seconds=2)
PIECES = [
    Piece(reasoning="hm, "),
    Piece(reasoning="so"),
    Piece(text="I look "),
    Piece(text="it up."),
    Piece(call=CallStart(0, "call_a", "look")),
    Piece(arguments='{"word": '),
    Piece(arguments='"rain"}'),
    Piece(call=CallStart(1, "call_b", "now"), arguments="{}"),
    Piece(finish_reason="tool_calls", usage=USAGE),
]
CUT_OFF = [*PIECES[:6], Piece(finish_reason="length", usage=USAGE)]


def streamed(writer: Any, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """The events of an answer."""
    events = [event for i, piece in enumerate(pieces) for event in writer.events(0, piece, first=i == 0)]
    return [*events, *writer.ending([USAGE])]


# -- Anthropic's Messages ----------------------------------------------------------------------------------------------


def test_messages_have_blocks_of_thinking_text_and_calls() -> None:
    whole = anthropic.Writer("m", True).whole([fold(PIECES)])
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm, so", "signature": ""},
        {"type": "text", "text": "I look it up."},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {"word": "rain"}},
        {"type": "tool_use", "id": "call_b", "name": "now", "input": {}},
    ]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    assert whole["usage"]["input_tokens"] == 5
    assert whole["usage"]["cache_read_input_tokens"] == 4


def test_streamed_messages_have_the_same_blocks() -> None:
    events = streamed(anthropic.Writer("m", True), PIECES)
    starts = {e["index"]: e["content_block"] for e in events if e["type"] == "content_block_start"}
    assert [block["type"] for block in starts.values()] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[3] == {"type": "tool_use", "id": "call_b", "name": "now", "input": {}}
    deltas = [(e["index"], e["delta"]) for e in events if e["type"] == "content_block_delta"]
    assert [delta["type"].removesuffix("_delta") for _, delta in deltas] == [
        *("thinking", "thinking", "text", "text", "input_json", "input_json", "input_json"),
    ]
    assert json.loads("".join(d["partial_json"] for i, d in deltas if i == 2)) == {"word": "rain"}
    order = [(e["type"].removeprefix("content_block_"), e["index"]) for e in events if "index" in e]
    assert [pair for pair in order if pair[0] != "delta"] == [(kind, i) for i in range(4) for kind in ("start", "stop")]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_call_that_was_cut_off_has_the_arguments_that_are_complete() -> None:
    whole = anthropic.Writer("m", True).whole([fold(CUT_OFF)])
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][-1]["input"] == {}
    assert whole["stop_reason"] == "max_tokens"


# -- OpenAI's Responses ------------------------------------------------------------------------------------------------


def response_writer() -> ResponseWriter:
    return ResponseWriter("m", True, {"parallel_tool_calls": True, "tool_choice": "auto"}, None)


def test_responses_have_items_of_reasoning_text_and_calls() -> None:
    whole = response_writer().whole([fold(PIECES)])
    reasoning, message, look, now = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, so"}]
    assert message["content"][0]["text"] == "I look it up."
    assert (look["call_id"], look["name"], look["arguments"]) == ("call_a", "look", '{"word": "rain"}')
    assert (now["call_id"], now["name"], now["arguments"]) == ("call_b", "now", "{}")
    assert {item["status"] for item in whole["output"]} == {whole["status"]} == {"completed"}
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 4


def test_openais_client_accumulates_the_events_of_a_response() -> None:
    from openai.lib.streaming.responses._responses import ResponseStreamState

    events = streamed(response_writer(), PIECES)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    adapter: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=openai.omit)
    for event in events:
        state.handle_event(adapter.validate_python(event))
    final = state._completed_response
    whole = response_writer().whole([fold(PIECES)])
    same = ("type", "arguments", "call_id", "name", "status")
    given = [{name: getattr(item, name, None) for name in same} for item in final.output]
    assert given == [{name: item.get(name) for name in same} for item in whole["output"]]
    assert final.output_text == "I look it up."
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert deltas == ['{"word": ', '"rain"}', "{}"]


def test_an_item_that_was_cut_off_is_incomplete() -> None:
    whole = response_writer().whole([fold(CUT_OFF)])
    assert [item["status"] for item in whole["output"]] == ["completed", "completed", "incomplete"]
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_calls_join_the_answer_that_they_belong_to() -> None:
    body = {
        "input": [
            {"role": "user", "content": "rain?"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": "I look it up."},
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "wet"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
        ]
    }
    _, answer, first, second = read_messages(responses._own(body)["messages"], [])
    assert (answer["content"], answer["reasoning_content"]) == ("I look it up.", "hm")
    assert [call["id"] for call in answer["tool_calls"]] == ["a", "b"]
    assert (first["role"], first["tool_call_id"], first["content"]) == ("tool", "a", "wet")
    assert (second["role"], second["tool_call_id"], second["content"]) == ("tool", "b", "noon")


def test_blocks_of_calls_and_results_are_messages_of_their_own() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"word": "é"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "wet"}]}
    body = {
        "messages": [
            {"role": "user", "content": "rain?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
            {"role": "user", "content": [{"type": "text", "text": "and now?"}, result]},
        ],
        "tools": [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    }
    own = anthropic._own(body)
    _, answer, tool, question = read_messages(own["messages"], [])
    (called,) = answer["tool_calls"]
    assert (called["id"], called["function"]) == ("a", {"name": "look", "arguments": '{"word": "é"}'})
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "")
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "a", "wet")
    assert question == {"role": "user", "content": "and now?"}
    (given,) = own["tools"]
    assert given["function"] == {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    assert own["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert own["parallel_tool_calls"] is False


# -- Ollama ------------------------------------------------------------------------------------------------------------


def test_lines_have_thinking_text_and_whole_calls() -> None:
    writer = ollama.Writer("m", ollama.CHAT.content, None)
    *lines, last = streamed(writer, PIECES)
    messages = [line["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in messages) == "hm, so"
    assert "".join(message["content"] for message in messages) == "I look it up."
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert calls == [
        {"id": "call_a", "function": {"index": 0, "name": "look", "arguments": {"word": "rain"}}},
        {"id": "call_b", "function": {"index": 1, "name": "now", "arguments": {}}},
    ]
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 7)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (10**9, 2 * 10**9)
    whole = ollama.Writer("m", ollama.CHAT.content, None).whole([fold(PIECES)])
    message = {"role": "assistant", "content": "I look it up.", "thinking": "hm, so", "tool_calls": calls}
    assert whole["message"] == message


def test_a_call_that_was_cut_off_is_in_no_line() -> None:
    lines = streamed(ollama.Writer("m", ollama.CHAT.content, None), CUT_OFF)
    assert not any("tool_calls" in line["message"] for line in lines)
    assert lines[-1]["done_reason"] == "length"


def test_results_belong_to_the_calls_of_their_tools() -> None:
    """Ollama's clients send no ids."""
    calls = [{"function": {"name": name, "arguments": {"word": "rain"}}} for name in ("look", "now", "look")]
    results = [{"role": "tool", "content": name, "tool_name": name} for name in ("now", "look", "look")]
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}, *results], "tools": [{"a": 1}]}
    own = ollama._conversation(body)
    answer, *given = read_messages(own["messages"], [])
    assert [call["id"] for call in answer["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert answer["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"word": "rain"}'}
    placed = [(message["tool_call_id"], message["content"]) for message in given]
    assert placed == [("call_0", "look"), ("call_1", "now"), ("call_2", "look")]
    assert own["tools"] == [{"a": 1}]
