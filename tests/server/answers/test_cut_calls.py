"""Answers that end inside a call of a tool: in every API, what the server writes it takes back.

One real text, with a call after another one, is cut behind every character, by the limit of tokens or by a stop string.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from polarlm.engine import Chunk, Engine, Usage
from polarlm.engine.parsing.answer_parser import AnswerParser
from polarlm.engine.parsing.pieces import Piece, fold
from polarlm.engine.requests.prompts import is_chat
from polarlm.server.answers.answering import _parse_chunk
from polarlm.server.http.generation import ModelInfo
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.values import BadRequest
from tests.server.apis import API, CONVERSATIONS

ARGUMENTS = r'{"city": "Ro\"me}", "days": [1, 25], "so": {"a": true, "b": -1.5e2}, "none": null}'
CALLS = [("time", "{}", ""), ("weather", ARGUMENTS, "")]
NAMES = [name for name, _, _ in CALLS]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USAGE = Usage(3, 2, 0, 0.0, 0.0)
QUESTION: Any = {"role": "user", "content": "How is it?"}


@pytest.fixture
def text(hermes_engine: Engine) -> str:
    """What the model writes: a sentence, and two calls."""
    return "I look.\n" + hermes_engine.model.template.calls.write_calls(CALLS)


@pytest.fixture
def about(hermes_engine: Engine) -> ModelInfo:
    return ModelInfo(hermes_engine.model, "hermes", parse_special=True, tells_cached=True, context=8192)


def pieces(engine: Engine, texts: list[str], reason: str = "length", stopped_by: str | None = None) -> list[Piece]:
    """The pieces of an answer whose text comes in `texts`, and ends for this reason."""
    parser = AnswerParser(engine.model.template.calls, NAMES, engine.model.tokenizer.control_tokens())
    stops = () if stopped_by is None else (stopped_by,)
    chunks = [Chunk(one, ()) for one in texts]
    last = Chunk("", (), finish_reason=reason, usage=USAGE, stopped_by=stopped_by)
    return [piece for chunk in [*chunks, last] for piece in _parse_chunk(chunk, parser, stops)]


TOOL = {"name": "time", "parameters": SCHEMA}
EACH = pytest.mark.parametrize("api", CONVERSATIONS.values(), ids=[*CONVERSATIONS])


def body_of(api: API, **more: Any) -> dict[str, Any]:
    return api.body([QUESTION], tools=[TOOL], **more)


def whole_body(api: API, about: ModelInfo, answer: list[Piece]) -> dict[str, Any]:
    _, writer = api.endpoint.read(body_of(api), about)
    return json.loads(json.dumps(writer.whole([fold(answer)]), allow_nan=False))


def streamed_events(api: API, about: ModelInfo, answer: list[Piece]) -> list[Any]:
    _, writer = api.endpoint.read(body_of(api, stream=True), about)
    events = [event for i, piece in enumerate(answer) for event in writer.events(0, piece, first=not i)]
    events = json.loads(json.dumps([*events, *writer.ending([USAGE])], allow_nan=False))
    return [event for event in events if event is not None]


@EACH
def test_an_answer_that_is_cut_anywhere_is_the_same_streamed_and_whole_and_is_taken_back(
    api: API, hermes_engine: Engine, about: ModelInfo, text: str
) -> None:
    for end in range(len(text) + 1):
        written = whole_body(api, about, pieces(hermes_engine, [text[:end]]))
        streamed = api.streamed(streamed_events(api, about, pieces(hermes_engine, [*text[:end]])))
        assert streamed == api.whole(written), text[:end]
        if end % 3:  # reading takes longer than writing
            continue
        history = [QUESTION, *api.back(written), QUESTION]
        asked: ParsedRequest = api.endpoint.read(api.body(history, tools=[TOOL]), about)[0]
        assert is_chat(asked.prompt)
        assert hermes_engine.prompt_ids(asked.prompt, asked.options), text[:end]


@EACH
def test_a_number_past_every_float_is_written_as_json(api: API, hermes_engine: Engine, about: ModelInfo) -> None:
    shown = hermes_engine.model.template.calls.write_calls([("time", '{"far": [1e999, -1e999]}', "")])
    answer = pieces(hermes_engine, [shown])
    assert api.whole(whole_body(api, about, answer)).calls
    assert streamed_events(api, about, answer)


@pytest.mark.parametrize("ended", ["length", "stop"])
def test_nothing_of_a_call_is_text(hermes_engine: Engine, text: str, ended: str) -> None:
    """And calls are only called so where they are complete."""
    for end in range(len(text)):
        stop = text[end : end + 3] if ended == "stop" else None
        answer = fold(pieces(hermes_engine, [text[:end]], ended, stop))
        assert "I look.\n".startswith(answer.text)
        assert [call.name for call in answer.calls] == NAMES[: len(answer.calls)]
        are_whole = all(call.arguments == wanted for call, (_, wanted, _) in zip(answer.calls, CALLS, strict=False))
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


# -- what comes back ---------------------------------------------------------------------------------------------------

CUT = '{"city": "Ro'


ARGUMENT_TEXTS = ["{", CUT, "[1]", "5", "[" * 9999, r'{"a": "\ud83d"}', '{"a": ' * 99 + "1" + "}" * 99]


@EACH
def test_arguments_may_be_any_text(api: API, hermes_engine: Engine, about: ModelInfo) -> None:
    """Other clients and servers write them, too."""
    for arguments in ARGUMENT_TEXTS:
        asked = api.endpoint.read(history(api, arguments), about)[0]
        (call,) = asked.prompt[1]["tool_calls"]
        assert call["function"]["arguments"] == arguments
        assert hermes_engine.prompt_ids(asked.prompt, asked.options)


def history(api: API, arguments: Any) -> dict[str, Any]:
    """A conversation with a call, in the names of an API."""
    function = {"name": "time", "arguments": arguments}
    calls = {
        "/v1/messages": {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "time", "input": arguments}],
        },
        "/v1/responses": {"type": "function_call", "call_id": "a", **function},
    }
    chat = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    return api.body([QUESTION, calls.get(api.path, chat), QUESTION], tools=[TOOL])


FIELDS = {
    "chat": "messages[1].tool_calls[0].function.arguments",
    "messages": "messages[1].content[0].input",
    "responses": "input[1].arguments",
    "ollama": "messages[1].tool_calls[0].function.arguments",
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_an_error_in_a_call_names_the_field_of_its_api(name: str, about: ModelInfo) -> None:
    api = CONVERSATIONS[name]
    with pytest.raises(BadRequest, match="a number that JSON does not have") as caught:
        api.endpoint.read(history(api, {"a": math.nan}), about)
    assert caught.value.field == FIELDS[name]
    assert str(caught.value).startswith(FIELDS[name])
