"""OpenAI's own client against the HTTP API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, SamplingParams
from tests.lazily import openai
from tests.server.http_server import KEY, Serving, serving
from tests.server.lines import eventually
from tests.tiny import forget

MESSAGES: list[Any] = [{"role": "user", "content": "then he ran on"}]
PROMPT = "the rain"  # shorter than a block, so that finding it in the cache changes no answer


@pytest.fixture
def server(tiny: Engine) -> Iterator[Serving]:
    with serving(tiny) as running:
        yield running


def alone(engine: Engine, prompt: Any, **params: Any) -> Completion:
    """What the engine answers by itself, without anything in its cache before or after."""
    forget(engine)
    answer = engine.generate(prompt, SamplingParams(**params))
    forget(engine)
    return answer


def chat(server: Serving, **more: Any) -> Any:
    given = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **more}
    return server.openai.chat.completions.create(**given)


def complete(server: Serving, **more: Any) -> Any:
    given = {"model": "any", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, **more}
    return server.openai.completions.create(**given)


# -- answers ---------------------------------------------------------------------------------------------------


def test_a_conversation_is_answered_as_the_engine_does(server: Serving) -> None:
    expected = alone(server.engine, MESSAGES, temperature=0, max_tokens=24)
    answer = chat(server)
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.object == "chat.completion"
    assert answer.model == server.engine.model.name
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_answer_is_the_same_in_pieces(server: Serving) -> None:
    expected = alone(server.engine, MESSAGES, temperature=0, max_tokens=24, ignore_eos=True)
    parts = list(chat(server, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    assert parts[0].choices[0].delta.role == "assistant"
    assert len(parts) > 3
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert len({part.id for part in parts}) == 1


def test_a_plain_prompt_is_continued(server: Serving) -> None:
    expected = alone(server.engine, PROMPT, temperature=0, max_tokens=24)
    whole = complete(server)
    forget(server.engine)
    parts = list(complete(server, stream=True))
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts) == expected.text
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == expected.finish_reason
    assert whole.object == parts[0].object == "text_completion"


def test_a_prompt_may_be_token_ids(server: Serving) -> None:
    ids = server.engine.tokenize(PROMPT)
    expected = alone(server.engine, ids, temperature=0, max_tokens=24)
    assert complete(server, prompt=ids).choices[0].text == expected.text


def test_roles_and_parts_of_newer_clients_are_understood(server: Serving) -> None:
    old = [{"role": "system", "content": "then on"}, {"role": "user", "content": "he ran"}]
    new = [
        {"role": "developer", "content": "then on"},
        {"role": "user", "content": [{"type": "text", "text": "he "}, {"type": "text", "text": "ran"}]},
    ]
    expected = chat(server, messages=old).choices[0].message.content
    forget(server.engine)
    assert chat(server, messages=new).choices[0].message.content == expected


# -- parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(server: Serving, stream: bool) -> None:
    text = alone(server.engine, PROMPT, temperature=0, max_tokens=24, ignore_eos=True).text
    stop = text[8:10]
    answer = complete(server, stop=[stop], stream=stream, extra_body={"ignore_eos": True})
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_an_answer_has_no_more_tokens_than_asked_for(server: Serving, limit: str) -> None:
    answer = server.openai.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True, limit: 5}
    )
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_the_server_may_have_a_limit_of_its_own(tiny: Engine) -> None:
    with serving(tiny, max_tokens=3) as server:
        assert chat(server, max_tokens=24, extra_body={"ignore_eos": True}).usage.completion_tokens == 3


def test_a_seed_makes_answers_repeatable(server: Serving) -> None:
    first, again, other = (
        complete(server, temperature=2, seed=seed, extra_body={"ignore_eos": True}).choices[0].text
        for seed in (7, 7, 8)
    )
    assert first == again != other


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_differ_and_are_those_of_the_seeds_that_follow(server: Serving, stream: bool) -> None:
    params: dict[str, Any] = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True}
    expected = [alone(server.engine, PROMPT, seed=seed, **params).text for seed in (7, 8, 9)]
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    given = {"temperature": 2, "max_tokens": 12, "seed": 7, "n": 3, "extra_body": {"ignore_eos": True}}
    answer = complete(server, stream=stream, **given, **more)
    parts = list(answer) if stream else [answer]
    texts = ["", "", ""]
    for choice in (choice for part in parts for choice in part.choices):
        texts[choice.index] += choice.text
    assert texts == expected
    assert len(set(texts)) == 3
    usage = parts[-1].usage
    assert usage.prompt_tokens == len(server.engine.tokenize(PROMPT))
    assert usage.completion_tokens == 36


def test_a_field_that_is_not_known_changes_nothing(server: Serving) -> None:
    expected = complete(server).choices[0].text
    more = {"user": "me", "store": True, "metadata": {"a": "b"}, "no_such_thing": [1, {"x": None}]}
    assert complete(server, extra_body=more).choices[0].text == expected


# -- usage -----------------------------------------------------------------------------------------------------


def test_a_stream_has_its_usage_at_the_end_where_that_is_asked_for(server: Serving) -> None:
    parts = list(chat(server, stream=True, stream_options={"include_usage": True}))
    forget(server.engine)
    assert parts[-1].choices == []
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].usage == chat(server).usage


def test_a_stream_has_no_usage_otherwise(server: Serving) -> None:
    assert all(part.usage is None and part.choices for part in chat(server, stream=True))


def test_tokens_of_an_earlier_turn_are_counted_as_cached(server: Serving) -> None:
    first = chat(server)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    turn = {"role": "assistant", "content": first.choices[0].message.content}
    second = chat(server, messages=[*MESSAGES, turn, {"role": "user", "content": "and then"}])
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens


# -- models ----------------------------------------------------------------------------------------------------


def test_the_model_is_listed_and_found(server: Serving) -> None:
    (model,) = server.openai.models.list().data
    assert model.id == server.engine.model.name
    assert server.openai.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("another/one")


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": "high"}, "top_p"),
        ({"n": -1}, "n"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream_options": 5}, "stream_options"),
    ],
)
def test_a_wrong_value_is_a_bad_request_that_names_the_field(
    server: Serving, given: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, **given)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"extra_body": {"functions": [{"name": "f"}]}}, "functions"),
        ({"extra_body": {"function_call": "auto"}}, "function_call"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_unsupported_requests_are_refused_by_name(server: Serving, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, **given)
    assert caught.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_an_error(server: Serving, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, messages=[{"role": "user", "content": "then " * 300}], stream=stream)
    assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key_is_an_authentication_error(tiny: Engine) -> None:
    with serving(tiny, api_key=KEY) as server:
        assert chat(server).choices
        with pytest.raises(openai.AuthenticationError) as caught:
            chat(Serving(**{**vars(server), "openai": server.openai.with_options(api_key="sk-another")}))
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_rate_limit_error(tiny: Engine, stream: bool) -> None:
    with serving(tiny, max_queue=0) as server:
        server.gate.close()
        others = {"prompt": "the rain", "max_tokens": 1, "n": tiny.config.parallel}
        with server.send("/v1/completions", others) as connection:
            eventually(lambda: server.driver.snapshot().active == tiny.config.parallel)
            with pytest.raises(openai.RateLimitError) as caught:
                chat(server, stream=stream)
            server.gate.open()
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "busy"
        assert chat(server).choices


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_an_error_that_is_not_tried_again(tiny: Engine) -> None:
    with serving(tiny, request_seconds=1) as server:
        server.gate.close()
        patient = server.openai.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError) as caught:
            chat(Serving(**{**vars(server), "openai": patient}))
        assert caught.value.status_code == 504
        assert caught.value.code == "timeout"
        assert server.outcomes() == {"timeout": 1}


def test_while_the_server_drains_requests_are_refused(server: Serving) -> None:
    server.run(server.driver.drain(60))
    with pytest.raises(openai.InternalServerError) as caught:
        chat(server)
    assert caught.value.status_code == 503
    assert caught.value.code == "closing"


def test_more_answers_than_the_queue_can_hold_are_not_a_busy_error(tiny: Engine) -> None:
    with serving(tiny, max_queue=0) as server:
        room = tiny.config.parallel
        body = {"prompt": "the rain", "max_tokens": 1, "n": room + 1}
        refused = server.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert f"room for {room} answer" in refused.json()["error"]["message"]
        assert "retry-after" not in refused.headers
        assert server.post("/v1/completions", body | {"n": room}).status_code == 200


# -- answers of a schema -----------------------------------------------------------------------------------------------


def test_answers_are_of_the_schema(server: Serving) -> None:
    """The vocabulary of this model has no braces, but digits."""
    schema = {"type": "integer", "minimum": 100, "maximum": 999}
    format = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema, "strict": True}}
    for seed in range(4):
        answer = chat(server, response_format=format, seed=seed, temperature=1, n=2)
        for choice in answer.choices:
            assert 100 <= int(choice.message.content or "") <= 999
            assert choice.finish_reason == "stop"
    answer = chat(server, extra_body={"guided_choice": ["yes", "no"]})
    assert answer.choices[0].message.content in ("yes", "no")


def test_an_impossible_schema_is_refused_with_the_reason(server: Serving) -> None:
    schema = {"type": "integer", "minimum": 3, "maximum": 1}
    with pytest.raises(openai.BadRequestError, match=r"minimum \(3\) is greater than maximum \(1\)"):
        chat(server, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
