"""Log-probabilities over HTTP, as OpenAI's own client reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, SamplingParams
from tests.pairs import each
from tests.server.http_server import Serving, serving

MESSAGES: list[Any] = [{"role": "user", "content": "then he ran on"}]
PROMPT = "the rain"
TOKENS = 24


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Serving]:
    """Keeps nothing, so that no answer depends on the one before."""
    with (
        Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=8, kept_sequences=0) as engine,
        serving(engine) as running,
    ):
        yield running


def expected(server: Serving, prompt: Any, count: int, **more: Any) -> Completion:
    params = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": count, **more}
    return server.engine.generate(prompt, SamplingParams(**params))


def chat(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS, "logprobs": True, **more}
    return server.openai.chat.completions.create(**fields, extra_body={"ignore_eos": True})


def complete(server: Serving, **more: Any) -> Any:
    fields = {"model": "any", "prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, **more}
    return server.openai.completions.create(**fields, extra_body={"ignore_eos": True})


def data(server: Serving, token_id: int) -> bytes:
    return server.engine.model.tokenizer.token_bytes(token_id)


def text(server: Serving, token_id: int) -> str:
    return data(server, token_id).decode("utf-8", "replace")


# -- conversations ---------------------------------------------------------------------------------------------


def assert_chat_tells(server: Serving, content: list[Any], answer: Completion) -> None:
    assert len(content) == len(answer.logprobs)
    for entry, token in zip(content, answer.logprobs, strict=True):
        told = [(entry.token, entry.bytes, entry.logprob), *((t.token, t.bytes, t.logprob) for t in entry.top_logprobs)]
        wanted = [(token.id, token.logprob), *token.top]
        assert told == [
            (text(server, i), list(data(server, i)), pytest.approx(logprob, abs=1e-5)) for i, logprob in wanted
        ]


@pytest.mark.parametrize("top", [{}, {"top_logprobs": 0}, {"top_logprobs": 20}])
def test_log_probabilities_of_a_conversation(server: Serving, top: dict[str, int]) -> None:
    answer = expected(server, MESSAGES, top.get("top_logprobs", 0))
    (choice,) = chat(server, **top).choices
    assert choice.message.content == answer.text
    assert_chat_tells(server, choice.logprobs.content, answer)
    assert choice.logprobs.refusal is None


def test_log_probabilities_of_a_streamed_conversation(server: Serving) -> None:
    answer = expected(server, MESSAGES, 3)
    parts = [part.choices[0] for part in chat(server, top_logprobs=3, stream=True)]
    told = [part.logprobs.content for part in parts if part.logprobs is not None]
    assert_chat_tells(server, [token for content in told for token in content], answer)
    assert len(told) == TOKENS  # as they come, also where a token completes no character
    assert "".join(part.delta.content or "" for part in parts) == answer.text
    assert [parts[0].logprobs, parts[-1].logprobs] == [None, None]  # the role, and the reason of the end


def test_bytes_of_half_a_character_are_exact(server: Serving) -> None:
    euro = server.engine.tokenize("€")
    banned = {str(i): -100000 for i in range(96) if i != euro[0]}
    (choice,) = chat(server, logit_bias=banned, max_tokens=1).choices
    (token,) = choice.logprobs.content
    assert (token.token, token.bytes) == ("\ufffd", list("€".encode()[:1]))


def test_an_answer_without_tokens_has_an_empty_list(server: Serving) -> None:
    answer = server.openai.chat.completions.create(
        model="any", messages=MESSAGES, logit_bias={"2": 100000}, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs.content == []


# -- plain prompts ---------------------------------------------------------------------------------------------


def assert_text_tells(server: Serving, told: dict[str, list[Any]], answer: Completion) -> None:
    ids = answer.token_ids
    assert told["tokens"] == [text(server, i) for i in ids]
    assert told["token_logprobs"] == pytest.approx([token.logprob for token in answer.logprobs], abs=1e-5)
    for entry, token in zip(told["top_logprobs"], answer.logprobs, strict=True):
        others = [*token.top, (token.id, token.logprob)]
        assert entry == pytest.approx({text(server, i): p for i, p in sorted(others, key=lambda o: o[1])}, abs=1e-5)
    whole = [server.engine.detokenize(ids[:count]).removesuffix("\ufffd") for count in range(len(ids))]
    assert told["text_offset"] == [len(before) for before in whole]


@pytest.mark.parametrize(("count", "stream"), each([0, 1, 5, 20], [False, True]))
def test_log_probabilities_of_a_plain_prompt(server: Serving, count: int, stream: bool) -> None:
    answer = expected(server, PROMPT, count)
    reply = complete(server, logprobs=count, stream=stream)
    choices = [part.choices[0] for part in (reply if stream else [reply])]
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in choices:
        for name in told if choice.logprobs is not None else ():
            told[name] += getattr(choice.logprobs, name)
    assert_text_tells(server, told, answer)
    assert "".join(choice.text for choice in choices) == answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_stop_string_are_told(server: Serving, stream: bool) -> None:
    whole = expected(server, PROMPT, 0).text
    stop = whole[6:9]
    answer = expected(server, PROMPT, 0, stop=(stop,))
    reply = complete(server, logprobs=0, stop=stop, stream=stream)
    choices = [part.choices[0] for part in (reply if stream else [reply])]
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    told = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert told == [text(server, i) for i in answer.token_ids]


# -- refusals --------------------------------------------------------------------------------------------------


def test_every_number_is_finite(server: Serving) -> None:
    answer = complete(server, logprobs=20, temperature=100, seed=2, logit_bias={"7": -100})
    told = answer.choices[0].logprobs
    assert all(math.isfinite(p) and p <= 0 for top in told.top_logprobs for p in top.values())
