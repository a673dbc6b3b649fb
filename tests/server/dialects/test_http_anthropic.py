"""Anthropic's own client against the HTTP API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from polarlm.engine import Engine
from tests.lazily import anthropic
from tests.server.http.test_http_openai import alone
from tests.server.http_server import KEY, Serving, serving
from tests.tiny import forget

KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
QUESTION: list[Any] = [{"role": "user", "content": "then he ran on"}]


@pytest.fixture
def server(tiny: Engine) -> Iterator[Serving]:
    with serving(tiny) as running:
        yield running


@contextmanager
def client_of(server: Serving, key: str = "any") -> Iterator[anthropic.Anthropic]:
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: Serving) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    """The body of a request for an answer of 24 tokens."""
    return {"model": "any", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **more}


def arguments(**more: Any) -> dict[str, Any]:
    """That request for the client, which takes some names of the API in a dictionary of their own."""
    body = asked(**more)
    aside = {
        name: body.pop(name)
        for name in ("temperature", "top_k", "top_p", "ignore_eos", "extra", "context_management")
        if name in body
    }
    return body | {"extra_body": aside}


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_message_is_answered_as_the_engine_does(server: Serving, client: anthropic.Anthropic) -> None:
    expected = alone(server.engine, QUESTION, temperature=0, max_tokens=24)
    message = client.messages.create(**arguments())
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected.text)
    assert (message.type, message.role, message.model) == ("message", "assistant", server.engine.model.name)
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
    assert message.stop_sequence is None
    assert message.usage.input_tokens == expected.usage.prompt_tokens
    assert message.usage.output_tokens == expected.usage.completion_tokens


def test_a_streamed_message_is_the_same_in_events(server: Serving, client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**arguments())
    forget(server.engine)
    with client.messages.stream(**arguments()) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "content_block_delta")]
        streamed = stream.get_final_message()
    assert kinds == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert [(block.type, block.text) for block in streamed.content] == [
        (block.type, block.text) for block in whole.content
    ]
    for field in ("stop_reason", "stop_sequence", "usage", "role", "model"):
        assert getattr(streamed, field) == getattr(whole, field), field


def test_each_event_is_named_by_its_type(server: Serving) -> None:
    text = server.post("/v1/messages", asked(stream=True)).text
    *events, rest = text.split("\n\n")
    assert rest == ""
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(f'data: {{"type":"{name}"' in event for name, event in zip(names, events, strict=True))


def test_the_system_prompt_and_blocks_are_text_of_the_conversation(
    server: Serving, client: anthropic.Anthropic
) -> None:
    messages = [
        {"role": "system", "content": "then on"},
        {"role": "user", "content": "he ran"},
        {"role": "assistant", "content": "on"},
        {"role": "user", "content": "and on"},
    ]
    expected = alone(server.engine, messages, temperature=0, max_tokens=24).text
    blocks: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "he "}, {"type": "text", "text": "ran"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "on"}]},
        {"role": "user", "content": [{"type": "text", "text": "and on", "cache_control": {"type": "ephemeral"}}]},
    ]
    system: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=5"},
        {"type": "text", "text": "then "},
        {"type": "text", "text": "on"},
    ]
    for given in ("then on", system):
        forget(server.engine)
        message = client.messages.create(**arguments(system=given, messages=blocks))
        assert "".join(block.text for block in message.content if block.type == "text") == expected


def test_sampling_is_that_of_the_request(server: Serving, client: anthropic.Anthropic) -> None:
    greedy = alone(server.engine, QUESTION, temperature=0, max_tokens=24).text
    for params in ({"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 0}):
        forget(server.engine)
        (block,) = client.messages.create(**arguments(**params)).content
        assert block.type == "text"
        assert block.text == greedy


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_message_and_is_named(
    server: Serving, client: anthropic.Anthropic, stream: bool
) -> None:
    text = alone(server.engine, QUESTION, temperature=0, max_tokens=24, ignore_eos=True).text
    stop = text[8:10]
    given = arguments(stop_sequences=["no such text", stop], ignore_eos=True)
    if stream:
        with client.messages.stream(**given) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**given)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == text[: text.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_a_message_has_no_more_tokens_than_asked_for(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**arguments(max_tokens=5, ignore_eos=True))
    assert (message.usage.output_tokens, message.stop_reason) == (5, "max_tokens")


def test_tokens_of_an_earlier_turn_count_as_read_from_the_cache(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**arguments(max_tokens=40, ignore_eos=True))
    assert first.usage.cache_read_input_tokens == 0
    again = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": "and then"}]
    second = client.messages.create(**arguments(messages=again))
    assert second.usage.cache_read_input_tokens
    assert second.usage.input_tokens > 0


def test_a_last_message_of_the_assistants_is_continued(server: Serving, client: anthropic.Anthropic) -> None:
    messages: list[Any] = [*QUESTION, {"role": "assistant", "content": "he ran"}]
    given = {"model": "any", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    expected = server.openai.chat.completions.create(messages=messages, **given)
    forget(server.engine)
    message = client.messages.create(**arguments(messages=messages, ignore_eos=True))
    (block,) = message.content
    assert block.type == "text"
    assert block.text == expected.choices[0].message.content
    assert message.usage.input_tokens == expected.usage.prompt_tokens


def test_tokens_can_be_counted_before(client: anthropic.Anthropic) -> None:
    given: Any = {"system": "then on", "messages": QUESTION, "model": "any"}
    usage = client.messages.create(**given, max_tokens=1).usage
    assert client.messages.count_tokens(**given).input_tokens == usage.input_tokens
    long = [{"role": "user", "content": "then " * 5000}]
    assert client.messages.count_tokens(model="any", messages=long).input_tokens > 5000  # more than the context
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.count_tokens(model="any", messages=[])


def test_a_server_may_hide_what_was_cached(tiny: Engine) -> None:
    with serving(tiny, hide_cached_tokens=True) as server, client_of(server) as client:
        first, second = (
            client.messages.create(**arguments(messages=[{"role": "user", "content": "on " * 20}])).usage for _ in "12"
        )
        assert second.cache_read_input_tokens == 0
        assert second.input_tokens == first.input_tokens


def test_fields_of_the_api_that_change_nothing_are_taken(client: anthropic.Anthropic) -> None:
    more: Any = {"metadata": {"user_id": "me"}, "service_tier": "auto", "thinking": {"type": "disabled"}}
    more |= {"output_config": {"effort": "low"}}
    assert client.messages.create(**arguments(**more, tools=[], extra=[{}], context_management=KEEPS_ALL)).content


# -- errors ------------------------------------------------------------------------------------------------------------


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "document", "source": {}}), "messages[0].content[0].type"),
        (user({"data": "on"}), "messages[0].content[0].type"),
        (user({"type": "text", "text": 5}), "messages[0].content[0].text"),
        ({"system": 5}, "system must be a string or an array of text blocks, not 5"),
        ({"messages": []}, "messages must be an array with at least one message, not an empty array"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "on"}, "stop_sequences"),
        ({"stop_sequences": ["on", 5]}, "stop_sequences[1]"),
        ({"tools": [{"name": "look", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management.edits[0]"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(server: Serving, given: dict[str, Any], place: str) -> None:
    response = server.post("/v1/messages", asked(**given))
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(place)


def test_models_have_anthropics_shape(server: Serving) -> None:
    with client_of(server) as client:
        (model,) = client.models.list()
        assert client.models.retrieve(model.id) == model
    assert (model.id, model.type, model.display_name) == (server.engine.model.name, "model", server.engine.model.name)
    assert abs(model.created_at.timestamp() - time.time()) < 3600
    (other,) = server.openai.models.list()
    assert (other.id, other.object) == (model.id, "model")


def test_arguments_that_are_no_json_are_refused(server: Serving) -> None:
    block = '{"type": "tool_use", "id": "a", "name": "f", "input": {"x": NaN}}'
    last = '{"role": "user", "content": "on"}'
    body = f'{{"messages": [{{"role": "assistant", "content": [{block}]}}, {last}]}}'
    response = server.http.post("/v1/messages", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[0].content[0].input")


def test_the_client_raises_its_own_errors(tiny: Engine) -> None:
    long = [{"role": "user", "content": "then " * 300}]
    with serving(tiny, api_key=KEY, max_body=5000) as server:
        with client_of(server, KEY) as client:
            assert client.messages.create(**arguments()).content
            with pytest.raises(anthropic.BadRequestError, match="exceeds the available context"):
                client.messages.create(**arguments(messages=long))
            with pytest.raises(anthropic.BadRequestError), client.messages.stream(**arguments(messages=long)) as stream:
                list(stream)
            with pytest.raises(anthropic.RequestTooLargeError):
                client.messages.create(**arguments(system="on " * 5000))
            with pytest.raises(anthropic.NotFoundError):
                client.messages.batches.list()
        with client_of(server, "sk-another") as client, pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**arguments())
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": caught.value.body["error"]["message"]},  # type: ignore[index]
    }


def test_an_error_in_the_middle_of_a_stream_is_raised(
    server: Serving, client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.server.http.test_http_streams import breaking

    breaking(server.engine, monkeypatch, steps=6)
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(**arguments(ignore_eos=True)) as stream,
    ):
        list(stream)
    assert "secret" not in str(caught.value.body)
    assert caught.value.body["type"] == "error"  # type: ignore[index]
