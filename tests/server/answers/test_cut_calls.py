"""Answers that end inside a call of a tool: in every API, what the server writes it takes back.

One real text, with a call after another one, is cut behind every character, by the limit of tokens or by a stop string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import jiter
import pytest

from polarlm.engine import Chunk, Engine, Usage
from polarlm.engine.requests.prompts import is_chat
from polarlm.server.answers.answer_parser import AnswerParser
from polarlm.server.answers.answering import _parsed
from polarlm.server.answers.pieces import Piece, fold
from polarlm.server.http.dialects import anthropic, ollama, responses
from polarlm.server.http.generation import About
from polarlm.server.http.openai.chat import OpenAI
from polarlm.server.http.openai.shapes import CHAT
from polarlm.server.reading.parameters import ParsedRequest
from tests.server.http_server import Serving

ARGUMENTS = r'{"city": "Ro\"me}", "days": [1, 25], "so": {"a": true, "b": -1.5e2}, "none": null}'
CALLS = [("time", "{}", ""), ("weather", ARGUMENTS, "")]
NAMES = [name for name, _, _ in CALLS]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USAGE = Usage(3, 2, 0, 0.0, 0.0)
QUESTION: Any = {"role": "user", "content": "How is it?"}
MARKUP = ("<tool", "<", '"name"', "arguments", "tool_call")


@pytest.fixture
def text(hermes_engine: Engine) -> str:
    """What the model writes: a sentence, and two calls."""
    return "I look.\n" + hermes_engine.model.template.calls.shown(CALLS)


@pytest.fixture
def about(hermes_engine: Engine) -> About:
    return About(hermes_engine.model, parse_special=True, tells_cached=True, context=8192)


def pieces(engine: Engine, texts: list[str], reason: str = "length", stopped_by: str | None = None) -> list[Piece]:
    """Those of an answer whose text comes in `texts`, and ends for this reason."""
    parser = AnswerParser(engine.model.template.calls, NAMES, engine.model.tokenizer.control_tokens())
    stops = () if stopped_by is None else (stopped_by,)
    chunks = [Chunk(one, ()) for one in texts]
    last = Chunk("", (), finish_reason=reason, usage=USAGE, stopped_by=stopped_by)
    return [piece for chunk in [*chunks, last] for piece in _parsed(chunk, parser, stops)]


def bare(value: Any) -> Any:
    """JSON without what is made up anew each time."""
    if isinstance(value, dict):
        made_up = ("id", "created", "created_at", "call_id", "item_id", "total_duration")
        return {name: bare(one) for name, one in value.items() if name not in made_up}
    return [bare(one) for one in value] if isinstance(value, list) else value


# -- the four APIs: how a client puts a stream together, and how it sends an answer back -------------------------------


def of_chat(events: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "calls": []}
    for choice in (choice for event in events if event for choice in event["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"]["arguments"]
        message["reason"] = choice["finish_reason"]
    return message


def whole_of_chat(body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = body["choices"]
    calls = [
        [call["function"]["name"], call["function"]["arguments"]] for call in choice["message"].get("tool_calls", ())
    ]
    return {"content": choice["message"]["content"] or "", "calls": calls, "reason": choice["finish_reason"]}


def back_to_chat(body: dict[str, Any]) -> dict[str, Any]:
    message = body["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "so"} for call in message.get("tool_calls", ())]
    return {"messages": [QUESTION, message, *results, QUESTION]}


def of_anthropic(events: list[Any]) -> Any:
    """With the function by which Anthropic's own client reads arguments that are not complete."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            field = "text" if delta["type"] == "text_delta" else "json"
            blocks[-1][field] += delta.get("text", "") + delta.get("partial_json", "")
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = jiter.from_json(written.encode(), partial_mode=True)
    (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    return {"content": blocks, "reason": end["stop_reason"]}


def whole_of_anthropic(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": body["content"], "reason": body["stop_reason"]}


def back_to_anthropic(body: dict[str, Any]) -> dict[str, Any]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "so"}
        for block in body["content"]
        if block["type"] == "tool_use"
    ]
    return {"messages": [QUESTION, body | {"role": "assistant"}, {"role": "user", "content": [*results, TEXT]}]}


TEXT = {"type": "text", "text": "Go on."}


def of_responses(events: list[Any]) -> Any:
    return whole_of_responses(events[-1]["response"])


def whole_of_responses(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": body["output"], "reason": body["status"]}


def back_to_responses(body: dict[str, Any]) -> dict[str, Any]:
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "so"}
        for item in body["output"]
        if item["type"] == "function_call"
    ]
    return {"input": [QUESTION, *body["output"], *results, QUESTION]}


def of_ollama(events: list[Any]) -> Any:
    messages = [event["message"] for event in events]
    content = "".join(message["content"] for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return {"content": content, "calls": calls, "reason": events[-1]["done_reason"]}


def whole_of_ollama(body: dict[str, Any]) -> dict[str, Any]:
    message = body["message"]
    return {"content": message["content"], "calls": message.get("tool_calls", []), "reason": body["done_reason"]}


def back_to_ollama(body: dict[str, Any]) -> dict[str, Any]:
    results = [{"role": "tool", "content": "so"} for _ in body["message"].get("tool_calls", ())]
    return {"messages": [QUESTION, body["message"], *results, QUESTION]}


API = tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any], dict[str, Any]]
TOOL = {"type": "function", "function": {"name": "time", "parameters": SCHEMA}}
APIS: dict[str, API] = {
    "chat": (OpenAI(CHAT), of_chat, whole_of_chat, back_to_chat, {"messages": [QUESTION], "tools": [TOOL]}),
    "anthropic": (
        anthropic.Messages(),
        of_anthropic,
        whole_of_anthropic,
        back_to_anthropic,
        {"messages": [QUESTION], "tools": [{"name": "time", "input_schema": SCHEMA}]},
    ),
    "responses": (
        responses.Responses(),
        of_responses,
        whole_of_responses,
        back_to_responses,
        {"input": "How is it?", "tools": [{"type": "function", "name": "time", "parameters": SCHEMA}]},
    ),
    "ollama": (ollama.CHAT, of_ollama, whole_of_ollama, back_to_ollama, {"messages": [QUESTION], "tools": [TOOL]}),
}
EACH = pytest.mark.parametrize("api", APIS.values(), ids=[*APIS])


def whole_body(api: API, about: About, answer: list[Piece]) -> dict[str, Any]:
    endpoint, _, _, _, body = api
    _, writer = endpoint.read(dict(body), about)
    return json.loads(json.dumps(writer.whole([fold(answer)])))


def streamed_events(api: API, about: About, answer: list[Piece]) -> list[Any]:
    endpoint, _, _, _, body = api
    _, writer = endpoint.read({**body, "stream": True}, about)
    events = [event for i, piece in enumerate(answer) for event in writer.events(0, piece, first=not i)]
    return json.loads(json.dumps(events + list(writer.ending([USAGE]))))


@pytest.mark.slow
@EACH
def test_an_answer_that_is_cut_anywhere_is_the_same_streamed_and_whole(
    api: API, hermes_engine: Engine, about: About, text: str
) -> None:
    _, together, of_whole, _, _ = api
    for end in range(len(text) + 1):
        whole = of_whole(whole_body(api, about, pieces(hermes_engine, [text[:end]])))
        streamed = together(streamed_events(api, about, pieces(hermes_engine, [*text[:end]])))
        assert bare(streamed) == bare(whole), text[:end]


@pytest.mark.slow
@EACH
def test_an_answer_that_is_cut_anywhere_is_taken_back(api: API, hermes_engine: Engine, about: About, text: str) -> None:
    endpoint, _, _, back, body = api
    for end in range(len(text) + 1):
        written = whole_body(api, about, pieces(hermes_engine, [text[:end]]))
        asked: ParsedRequest = endpoint.read(json.loads(json.dumps({**body, **back(written)})), about)[0]
        assert is_chat(asked.prompt)
        assert hermes_engine.prompt_ids(asked.prompt, asked.options), text[:end]


@pytest.mark.parametrize("ended", ["length", "stop"])
def test_nothing_of_a_call_is_text(hermes_engine: Engine, text: str, ended: str) -> None:
    """And calls are only called so where they are complete."""
    for end in range(len(text)):
        stop = text[end : end + 3] if ended == "stop" else None
        answer = fold(pieces(hermes_engine, [text[:end]], ended, stop))
        assert "I look.\n".startswith(answer.text)
        assert [call.name for call in answer.calls] == NAMES[: len(answer.calls)]
        are_whole = all(call.arguments == given for call, (_, given, _) in zip(answer.calls, CALLS, strict=False))
        if ended == "length":
            assert answer.finish_reason == "length"
        elif answer.finish_reason == "tool_calls":
            assert answer.calls
            assert are_whole
        else:
            assert answer.stopped_by == stop


def test_a_sign_that_begins_no_call_is_text(hermes_engine: Engine) -> None:
    """What comes next tells: here the stop string, and else the end, which is the model's own."""
    assert fold(pieces(hermes_engine, ["1 <"], "stop", " 2")).text == "1 <"
    assert fold(pieces(hermes_engine, ["1 <"], "stop")).text == "1 <"
    assert fold(pieces(hermes_engine, ["1 <"], "length")).text == "1"


# -- over HTTP ---------------------------------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
BODY: dict[str, Any] = {
    "messages": [QUESTION],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY}}],
    "tool_choice": "required",
    "temperature": 1,
    "seed": 1,
}


def chat(hermes: Serving, **more: Any) -> dict[str, Any]:
    response = hermes.post("/v1/chat/completions", {**BODY, **more})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def test_a_conversation_goes_on_after_a_call_that_is_cut_off(hermes: Serving) -> None:
    cut = chat(hermes, max_tokens=60)
    (call,) = cut["message"]["tool_calls"]
    with pytest.raises(ValueError):
        json.loads(call["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "The arguments are no JSON."}
    messages = [QUESTION, cut["message"], result]
    assert chat(hermes, messages=messages, tool_choice="none", max_tokens=1)["finish_reason"] == "length"
    shown = hermes.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert (
        json.dumps(call["function"]["arguments"], ensure_ascii=False) in shown
    )  # this template writes the text as a JSON string


@pytest.mark.parametrize("stop", ['"city"', '{"city": "', '"name"', "weather"])
def test_a_stop_string_ends_a_call_as_it_ends_text(hermes: Serving, stop: str) -> None:
    choice = chat(hermes, max_tokens=200, stop=[stop])
    assert choice["finish_reason"] == "stop"
    assert not choice["message"]["content"]
    for call in choice["message"].get("tool_calls", ()):
        assert '{"city": "'.startswith(call["function"]["arguments"])


def test_a_stop_string_after_the_arguments_leaves_the_call_whole(hermes: Serving) -> None:
    choice = chat(hermes, max_tokens=400, stop=["\n</tool_call>"], logit_bias={'"': 30})
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    json.loads(call["function"]["arguments"])


# -- what comes back ---------------------------------------------------------------------------------------------------

CUT = '{"city": "Ro'


# Each API takes arguments as text or as an object, by code of its own.
@pytest.mark.parametrize(
    "arguments", ["{", CUT, "[1]", "5", "[" * 9999, r'{"a": "\ud83d"}', '{"a": ' * 99 + "1" + "}" * 99]
)
@EACH
def test_arguments_may_be_any_text(api: API, hermes_engine: Engine, about: About, arguments: str) -> None:
    """Other clients and servers write them, too."""
    endpoint, _, _, _, body = api
    asked = endpoint.read({**body, **history(api, arguments)}, about)[0]
    (call,) = asked.prompt[1]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    assert hermes_engine.prompt_ids(asked.prompt, asked.options)


def history(api: API, arguments: Any) -> dict[str, Any]:
    """A conversation with a call, in the names of an API."""
    function = {"name": "time", "arguments": arguments}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    use = {"type": "tool_use", "id": "a", "name": "time", "input": arguments}
    given: dict[Any, Any] = {
        anthropic.Messages: {"messages": [QUESTION, {"role": "assistant", "content": [use]}, QUESTION]},
        responses.Responses: {"input": [QUESTION, {"type": "function_call", "call_id": "a", **function}, QUESTION]},
    }
    return given.get(type(api[0]), {"messages": [QUESTION, called, QUESTION]})


FIELDS = {
    "chat": "messages[1].tool_calls[0].function.arguments",
    "anthropic": "messages[1].content[0].input",
    "responses": "input[1].arguments",
    "ollama": "messages[1].tool_calls[0].function.arguments",
}


@pytest.mark.parametrize("name", APIS)
def test_an_error_in_a_call_names_the_field_of_its_api(name: str, about: About) -> None:
    endpoint, _, _, _, body = APIS[name]
    with pytest.raises(Exception, match="a number that JSON does not have") as caught:
        endpoint.read({**body, **history(APIS[name], {"a": math.nan})}, about)
    assert caught.value.field == FIELDS[name]  # type: ignore[attr-defined]
    assert str(caught.value).startswith(FIELDS[name])
