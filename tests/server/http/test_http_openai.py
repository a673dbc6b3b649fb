"""What OpenAI's two older endpoints alone have, with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest

from polarlm.engine import Engine
from tests.lazily import openai
from tests.server.apis import alone
from tests.server.http_server import KEY, Serving, serving
from tests.server.lines import eventually
from tests.tiny import forget

MESSAGES: list[Any] = [{"role": "user", "content": "then he ran on"}]
PROMPT = "the rain"  # shorter than a block, so that finding it in the cache changes no answer


def chat(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **more}
    return server.openai.chat.completions.create(**fields)


def complete(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, **more}
    return server.openai.completions.create(**fields)


# -- answers ---------------------------------------------------------------------------------------------------


def test_answers_and_streams_have_openais_fields(server: Serving) -> None:
    answer = chat(server, extra_body={"ignore_eos": True})
    assert (answer.object, answer.model) == ("chat.completion", server.engine.model.name)
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    forget(server.engine)
    parts = list(chat(server, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert len(parts) > 3
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert len({part.id for part in parts}) == 1
    assert all(part.usage is None and part.choices for part in parts)
    whole, *pieces = complete(server), *complete(server, stream=True)
    assert {whole.object, *(part.object for part in pieces)} == {"text_completion"}
    ids = server.engine.tokenize(PROMPT)
    assert complete(server, prompt=ids).choices[0].text == whole.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_differ_and_are_those_of_the_seeds_that_follow(server: Serving, stream: bool) -> None:
    params: dict[str, Any] = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True}
    expected = [alone(server.engine, PROMPT, seed=seed, **params).text for seed in (7, 8, 9)]
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    fields = {"temperature": 2, "max_tokens": 12, "seed": 7, "n": 3, "extra_body": {"ignore_eos": True}}
    answer = complete(server, stream=stream, **fields, **more)
    parts = list(answer) if stream else [answer]
    texts = ["", "", ""]
    for choice in (choice for part in parts for choice in part.choices):
        texts[choice.index] += choice.text
    assert texts == expected
    assert len(set(texts)) == 3
    usage = parts[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(server.engine.tokenize(PROMPT)), 36)


def test_a_stream_has_its_usage_at_the_end_where_that_is_asked_for(server: Serving) -> None:
    parts = list(chat(server, stream=True, stream_options={"include_usage": True}))
    forget(server.engine)
    assert parts[-1].choices == []
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].usage == chat(server).usage


def test_the_model_is_listed_and_found(server: Serving) -> None:
    (model,) = server.openai.models.list().data
    assert model.id == server.engine.model.name
    assert server.openai.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("another/one")


# -- errors ----------------------------------------------------------------------------------------------------


def test_the_client_raises_its_own_errors(tiny: Engine) -> None:
    with serving(tiny, api_key=KEY) as server:
        with pytest.raises(openai.BadRequestError) as bad:
            chat(server, temperature=-1)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as long:
            chat(server, messages=[{"role": "user", "content": "then " * 300}], stream=True)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError) as caught:
            chat(Serving(**{**vars(server), "openai": server.openai.with_options(api_key="sk-another")}))
        assert caught.value.code == "invalid_api_key"


def test_a_full_queue_is_a_rate_limit_error(tiny: Engine) -> None:
    with serving(tiny, max_queue=0) as server:
        server.gate.close()
        others = {"prompt": "the rain", "max_tokens": 1, "n": tiny.config.parallel}
        with server.send("/v1/completions", others) as connection:
            eventually(lambda: server.driver.snapshot().active == tiny.config.parallel)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    chat(server, stream=stream)
                assert int(caught.value.response.headers["retry-after"]) >= 1
                assert caught.value.code == "busy"
            server.gate.open()
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert chat(server).choices


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_an_error_that_is_not_tried_again(tiny: Engine) -> None:
    """Slow: it waits for a second to pass."""
    with serving(tiny, request_seconds=1) as server:
        server.gate.close()
        patient = server.openai.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError) as caught:
            chat(Serving(**{**vars(server), "openai": patient}))
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        assert server.outcomes() == {"timeout": 1}


def test_while_the_server_drains_requests_are_refused(server: Serving) -> None:
    server.run(server.driver.drain(60))
    with pytest.raises(openai.InternalServerError) as caught:
        chat(server)
    assert (caught.value.status_code, caught.value.code) == (503, "closing")


def test_more_answers_than_the_queue_can_hold_are_not_a_busy_error(tiny: Engine) -> None:
    with serving(tiny, max_queue=0) as server:
        room = tiny.config.parallel
        body = {"prompt": "the rain", "max_tokens": 1, "n": room + 1}
        refused = server.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        assert f"room for {room} answer" in refused.json()["error"]["message"]
        assert "retry-after" not in refused.headers
        assert server.post("/v1/completions", body | {"n": room}).status_code == 200
