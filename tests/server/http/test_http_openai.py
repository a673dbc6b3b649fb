"""What OpenAI's two older endpoints alone have, with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest

from polarlm.engine import Engine
from tests.lazily import openai
from tests.server.apis import alone
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually

MESSAGES: list[Any] = [{"role": "user", "content": "then he ran on"}]
PROMPT = "the rain"  # shorter than a block, so that finding it in the cache changes no answer


def chat(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **more}
    return server.openai.chat.completions.create(**fields)


def complete(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, **more}
    return server.openai.completions.create(**fields)


# -- answers ---------------------------------------------------------------------------------------------------


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


# -- errors ----------------------------------------------------------------------------------------------------


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
        error = server.refused("/v1/completions", body)
        assert error["param"] == "n"
        assert f"room for {room} answer" in error["message"]
        assert server.post("/v1/completions", body | {"n": room}).status_code == 200
