"""OpenAI's own client against /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polarlm.engine import Engine
from polarlm.server.http.warnings import HEADER
from tests.lazily import openai
from tests.server.http.test_http_openai import alone
from tests.server.http.test_http_streams import breaking
from tests.server.http_server import Serving, serving
from tests.tiny import forget

QUESTION = "then he ran on"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def server(tiny: Engine) -> Iterator[Serving]:
    with serving(tiny) as running:
        yield running


def arguments(**more: Any) -> dict[str, Any]:
    """A request for an answer of 24 tokens."""
    return {"model": "any", "input": QUESTION, "temperature": 0, "max_output_tokens": 24, **more}


def endless(**more: Any) -> dict[str, Any]:
    """One whose answer has all of its tokens."""
    return arguments(extra_body={"ignore_eos": True}, **more)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_an_input_is_answered_as_the_engine_does(server: Serving) -> None:
    expected = alone(server.engine, MESSAGES, temperature=0, max_tokens=24, ignore_eos=True)
    response = server.openai.responses.create(**endless())
    (item,) = response.output
    assert (item.type, item.status) == ("message", "incomplete")
    assert response.output_text == expected.text
    assert (response.object, response.status, response.model) == ("response", "incomplete", server.engine.model.name)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == expected.usage.prompt_tokens
    assert response.usage.output_tokens == 24
    assert response.usage.total_tokens == 24 + expected.usage.prompt_tokens


def test_an_answer_that_stops_is_complete(server: Serving) -> None:
    text = alone(server.engine, MESSAGES, temperature=0, max_tokens=24, ignore_eos=True).text
    response = server.openai.responses.create(**arguments(extra_body={"ignore_eos": True, "stop": text[8:10]}))
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert response.output_text == text[: text.index(text[8:10])]


def test_a_streamed_response_is_the_same_in_events(server: Serving) -> None:
    whole = server.openai.responses.create(**endless())
    forget(server.engine)
    events = list(server.openai.responses.create(**endless(stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    middle = kinds.count("output_text.delta")
    assert middle > 3
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * middle,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage == whole.usage
    assert last.response.output_text == text
    same = ("status", "model", "incomplete_details", "temperature", "max_output_tokens", "tool_choice", "text")
    for field in same:
        assert getattr(last.response, field) == getattr(whole, field), field


def test_the_clients_own_stream_accumulates_it(server: Serving) -> None:
    text = alone(server.engine, MESSAGES, temperature=0, max_tokens=24, ignore_eos=True).text
    more = {"ignore_eos": True, "stop": text[8:10]}
    with server.openai.responses.stream(**arguments(extra_body=more)) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == text[: text.index(text[8:10])]
    assert "response.completed" in kinds


def test_items_are_the_messages_of_a_conversation(server: Serving) -> None:
    messages = [
        {"role": "system", "content": "then on"},
        {"role": "user", "content": "he ran"},
        {"role": "assistant", "content": "on"},
        {"role": "system", "content": "and"},
        {"role": "user", "content": "and on"},
    ]
    expected = alone(server.engine, messages, temperature=0, max_tokens=24, ignore_eos=True).text
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "he "}, {"type": "input_text", "text": "ran"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "on", "annotations": []}],
        },
        {"type": "message", "role": "developer", "content": "and"},
        {"type": "message", "role": "user", "content": "and on"},
    ]
    assert server.openai.responses.create(**endless(instructions="then on", input=given)).output_text == expected


def test_the_output_can_be_sent_back(server: Serving) -> None:
    first = server.openai.responses.create(**endless(max_output_tokens=40))
    assert first.usage.input_tokens_details.cached_tokens == 0
    again: list[Any] = [*MESSAGES, *first.output, {"role": "user", "content": "and then"}]
    second = server.openai.responses.create(**endless(input=again))
    assert second.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_engine(server: Serving, stream: bool) -> None:
    expected = alone(server.engine, MESSAGES, temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
    given = endless(top_logprobs=2, include=["message.output_text.logprobs"])
    if stream:
        (*_, last) = server.openai.responses.create(**given, stream=True)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = server.openai.responses.create(**given)
    (item,) = response.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [token.logprob for token in part.logprobs] == [token.logprob for token in expected.logprobs]
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


def test_an_answer_is_of_the_format(server: Serving) -> None:
    """The vocabulary of this model has no braces, but digits."""
    schema = {"type": "integer", "minimum": 100, "maximum": 999}
    format: Any = {"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}}
    response = server.openai.responses.create(**arguments(text=format))
    assert 100 <= int(response.output_text) <= 999
    assert response.status == "completed"
    assert response.text.to_dict() == format


def test_what_a_request_says_is_repeated(server: Serving) -> None:
    more = {"metadata": {"a": "b"}, "user": "me", "store": False, "top_p": 0.5, "instructions": "on"}
    response = server.openai.responses.create(**arguments(**more, include=["reasoning.encrypted_content"]))
    assert (response.metadata, response.top_p, response.instructions) == ({"a": "b"}, 0.5, "on")
    assert (response.temperature, response.max_output_tokens, response.store) == (0, 24, False)  # type: ignore[attr-defined]


def test_a_last_message_of_the_assistants_is_not_continued(server: Serving) -> None:
    messages: list[Any] = [*MESSAGES, {"role": "assistant", "content": "he ran"}]
    more = {"ignore_eos": True, "continue_final_message": False}
    expected = server.openai.chat.completions.create(
        model="any", messages=messages, temperature=0, max_tokens=24, extra_body=more
    )
    forget(server.engine)
    assert server.openai.responses.create(**endless(input=messages)).output_text == expected.choices[0].message.content


def test_tokens_can_be_counted_before(server: Serving) -> None:
    response = server.openai.responses.create(**endless(instructions="on"))
    counted = server.openai.responses.input_tokens.count(model="any", input=QUESTION, instructions="on")
    assert (counted.input_tokens, counted.object) == (response.usage.input_tokens, "response.input_tokens")


def test_a_base_url_may_lack_the_version(server: Serving) -> None:
    assert server.post("/responses", arguments()).json()["object"] == "response"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 5}}}, "text.format.strict"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "always"}, "truncation"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"parallel_tool_calls": 5}, "parallel_tool_calls"),
    ],
)
def test_a_wrong_value_is_a_bad_request_that_names_the_field(
    server: Serving, given: dict[str, Any], param: str
) -> None:
    response = server.post("/v1/responses", arguments(**given))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(param)


def test_keywords_that_are_not_supported_are_refused_where_a_format_is_strict(server: Serving) -> None:
    format = {"type": "json_schema", "schema": {"type": "integer", "not": {}}}
    assert server.post("/v1/responses", arguments(text={"format": format})).status_code == 200
    refused = server.post("/v1/responses", arguments(text={"format": {**format, "strict": True}}))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "text.format"
    assert '"not"' in refused.json()["error"]["message"]


def test_wishes_are_ignored_with_a_warning(server: Serving) -> None:
    response = server.post("/v1/responses", arguments(text={"verbosity": "low"}, truncation="auto"))
    assert response.status_code == 200
    told = response.headers[HEADER]
    assert told.startswith("text.verbosity is ignored: ")
    assert told.endswith("; truncation is ignored: this server cuts no prompt")


def test_a_prompt_that_is_too_long_has_a_status_or_is_a_stream_that_failed(server: Serving) -> None:
    """Codex compacts a conversation after such a stream alone."""
    too_long = arguments(input="then " * 300)
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.responses.create(**too_long)
    assert caught.value.code == "context_length_exceeded"
    first, *_, last = server.openai.responses.create(**too_long, stream=True)
    assert (first.type, last.type, last.response.status) == ("response.created", "response.failed", "failed")
    assert last.response.error.code == "context_length_exceeded"
    assert "maximum context length" in last.response.error.message


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_event_has_a_status(server: Serving, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError):
        server.openai.responses.create(**arguments(input=[], stream=stream))
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve("resp_1")


def test_an_error_in_the_middle_is_a_response_that_failed(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(server.engine, monkeypatch, steps=6)
    *_, last = server.openai.responses.create(**endless(stream=True))
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert "secret" not in last.response.error.message
