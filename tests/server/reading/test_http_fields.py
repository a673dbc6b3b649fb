"""What clients of other servers send, over HTTP: it does what it says, or is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from polarlm.engine import Engine
from tests.server.http_server import Serving, serving
from tests.tiny import EOS

PROMPT = "then he ran on and on and on"
WRITTEN = "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"


def complete(server: Serving, **more: Any) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 12, "cache_prompt": False, **more}
    response = server.post("/v1/completions", {name: value for name, value in fields.items() if value is not None})
    assert response.status_code == 200, response.text
    return response.json()


def text(server: Serving, **more: Any) -> str:
    return complete(server, **more)["choices"][0]["text"]


def tokens(server: Serving, **more: Any) -> int:
    return complete(server, **more)["usage"]["completion_tokens"]


# -- honoured --------------------------------------------------------------------------------------------------------


def test_tokens_that_end_an_answer(server: Serving) -> None:
    early = {"ignore_eos": False, "logit_bias": {str(EOS[0]): 1e5}}
    assert tokens(server, **early) == 0
    assert tokens(server, **early, min_tokens=3) == 3
    liked = {"logit_bias": {"50": 1e5}, "stop_token_ids": [60, 50]}
    assert tokens(server, **liked) == 0
    assert tokens(server, **liked, min_tokens=2) == 2


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
