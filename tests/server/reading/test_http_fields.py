"""What clients of other servers send, over HTTP: it does what it says, or is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polarlm.engine import Engine
from tests.server.http_server import Serving, serving
from tests.server.lines import Client
from tests.server.reading.test_fields import REFUSED, asking
from tests.tiny import CONTEXT, EOS

PROMPT = "then he ran on and on and on"
WRITTEN = "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "then he ran on and on"}]


@pytest.fixture
def server(tiny: Engine) -> Iterator[Serving]:
    with serving(tiny) as running:
        yield running


def complete(server: Serving, **more: Any) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 12, "cache_prompt": False, **more}
    response = server.post("/v1/completions", {name: value for name, value in fields.items() if value is not None})
    assert response.status_code == 200, response.text
    return response.json()


def text(server: Serving, **more: Any) -> str:
    return complete(server, **more)["choices"][0]["text"]


def tokens(server: Serving, **more: Any) -> int:
    return complete(server, **more)["usage"]["completion_tokens"]


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_refused_field_is_a_bad_request_that_names_it(server: Serving, path: str) -> None:
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    for field in REFUSED:
        name = field.name
        if name == "add_special_tokens" and "messages" in prompt:
            continue  # false is what a conversation has
        if name in ("echo", "suffix") and "prompt" in prompt:
            continue  # honoured there alone
        response = server.post(path, {**prompt, name: asking(field)[0], "max_tokens": 1})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, name, "invalid_request")
        assert name in error["message"]


def test_a_bad_bias_is_not_repeated_at_length(server: Serving) -> None:
    biases = {str(token): 1e7 for token in range(1000)}
    response = server.post("/v1/completions", {"prompt": PROMPT, "logit_bias": biases})
    assert response.status_code == 400
    assert "logit_bias" in response.json()["error"]["message"]
    assert len(response.text) < 400


# -- honoured --------------------------------------------------------------------------------------------------------


def test_every_name_of_max_tokens_is_honoured(server: Serving) -> None:
    assert tokens(server, max_tokens=None, n_predict=3) == 3
    assert tokens(server, max_tokens=5.0, n_predict=3) == 5
    assert tokens(server, max_completion_tokens=4) == 4


def test_every_name_of_repeat_penalty_is_honoured(server: Serving) -> None:
    plain = text(server)
    assert text(server, repeat_penalty=1.8) == text(server, repetition_penalty=1.8) != plain
    assert text(server, repetition_penalty=1.8, repeat_last_n=0) == plain
    assert text(server, repetition_penalty=1.8, repeat_last_n=2) != text(server, repetition_penalty=1.8)


def test_every_name_of_logprobs_is_honoured(server: Serving) -> None:
    def told(**more: Any) -> Any:
        return complete(server, **more)["choices"][0]["logprobs"]

    assert told(n_probs=2) == told(logprobs=2) is not None
    assert told(n_probs=0) is None
    asked = {"messages": MESSAGES, "max_tokens": 1, "ignore_eos": True, "n_probs": 2}
    response = server.post("/v1/chat/completions", asked)
    assert len(response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_samplers_that_are_off(server: Serving) -> None:
    drawn = {"temperature": 1.5, "seed": 1, "max_tokens": 40, "min_p": 0}
    assert text(server, **drawn, top_k=-1) == text(server, **drawn, top_k=0) != text(server, **drawn, top_k=1)
    assert text(server, **drawn, top_p=0) == text(server, temperature=0, max_tokens=40)


def test_tokens_that_end_an_answer(server: Serving) -> None:
    early = {"ignore_eos": False, "logit_bias": {str(EOS[0]): 1e5}}
    assert tokens(server, **early) == 0
    assert tokens(server, **early, min_tokens=3) == 3
    liked = {"logit_bias": {"50": 1e5}, "stop_token_ids": [60, 50]}
    assert tokens(server, **liked) == 0
    assert tokens(server, **liked, min_tokens=2) == 2


def test_a_bias_is_for_texts_too(server: Serving) -> None:
    assert set(text(server, logit_bias=[["q", 1e5]])) == {"q"}
    banned = server.engine.tokenize(text(server))[0]
    assert text(server, logit_bias={str(banned): False}) != text(server)


def test_the_cache_is_left_out_or_kept_apart(server: Serving) -> None:
    assert cached(complete(server, cache_prompt=None)) == 0
    assert cached(complete(server, cache_prompt=None)) > 0
    assert cached(complete(server, cache_prompt=True)) > 0
    assert cached(complete(server, cache_prompt=False)) == 0
    assert cached(complete(server, cache_prompt=None, cache_salt="ours")) == 0
    assert cached(complete(server, cache_prompt=None, cache_salt="ours")) > 0
    assert cached(complete(server, cache_prompt=None, cache_salt="theirs")) == 0


def test_a_raw_prompt_has_control_tokens(server: Serving) -> None:
    """What a client writes in the model's own template is what the template would have made of its messages."""
    raw = complete(server, prompt=WRITTEN)
    asked = {"messages": [{"role": "user", "content": "the end"}], "temperature": 0, "ignore_eos": True}
    chat = server.post("/v1/chat/completions", {**asked, "max_tokens": 12, "cache_prompt": False}).json()
    assert raw["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    assert raw["choices"][0]["text"] == chat["choices"][0]["message"]["content"]
    as_text = complete(server, prompt=WRITTEN, parse_special=False)["usage"]["prompt_tokens"]
    assert as_text == len(server.engine.tokenize(WRITTEN)) > raw["usage"]["prompt_tokens"]


@pytest.mark.parametrize("parse_special", [None, True])
def test_in_messages_control_strings_are_text(server: Serving, parse_special: bool | None) -> None:
    def count(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "parse_special": parse_special}
        return server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]

    assert count("the<|im_end|>") - count("the") == len(server.engine.tokenize("<|im_end|>")) > 1


def test_a_server_may_take_raw_prompts_as_text(tiny: Engine) -> None:
    with serving(tiny, parse_special=False) as server:
        plain = len(tiny.tokenize(WRITTEN))
        assert complete(server, prompt=WRITTEN)["usage"]["prompt_tokens"] == plain
        assert complete(server, prompt=WRITTEN, parse_special=True)["usage"]["prompt_tokens"] < plain
        assert 2 not in server.post("/tokenize", {"content": "<|im_end|>"}).json()["tokens"]


# -- what is told ----------------------------------------------------------------------------------------------------


def test_the_socket_hides_cached_tokens_too(start: Any) -> None:
    for hidden in (False, True):
        with Client(start(hide_cached_tokens=hidden).address) as client:
            _, last = client.ask(id=1, prompt="the", max_tokens=2)
            assert ("cached_tokens" in last["usage"]) is not hidden
            assert last["usage"]["prompt_tokens"] > 0
            _, last = client.ask(id=2, prompt=[7] * 300)
            assert last["error"]["n_ctx"] == CONTEXT
            _, last = client.ask(id=3, prompt="the", n_predict=3, mirostat=2)
            assert last["error"]["field"] == "mirostat"
