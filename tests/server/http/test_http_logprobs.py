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


def logprobs_of(endpoint: Any, **more: Any) -> list[Any]:
    """The only choice of an answer, or its parts in a stream."""
    fields = {"model": "any", "temperature": 0, "max_tokens": TOKENS, **more}
    reply = endpoint.create(**fields, extra_body={"ignore_eos": True})
    return [part.choices[0] for part in (reply if more.get("stream") else [reply])]


def data(server: Serving, token_id: int) -> bytes:
    return server.engine.model.tokenizer.token_bytes(token_id)


def text(server: Serving, token_id: int) -> str:
    return data(server, token_id).decode("utf-8", "replace")


# -- conversations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top", "stream"), [(None, False), (0, False), (20, False), (3, True)])
def test_log_probabilities_of_a_conversation(server: Serving, top: int | None, stream: bool) -> None:
    more = {} if top is None else {"top_logprobs": top}
    answer = expected(server, MESSAGES, top or 0)
    parts = logprobs_of(server.openai.chat.completions, messages=MESSAGES, logprobs=True, stream=stream, **more)
    told = [part.logprobs.content for part in parts if part.logprobs is not None]
    assert len(told) == (TOKENS if stream else 1)  # as they come, also where a token completes no character
    for entry, token in zip([entry for content in told for entry in content], answer.logprobs, strict=True):
        assert [(one.token, one.bytes, one.logprob) for one in (entry, *entry.top_logprobs)] == [
            (text(server, i), list(data(server, i)), pytest.approx(logprob, abs=1e-5))
            for i, logprob in ((token.id, token.logprob), *token.top)
        ]


def test_bytes_of_half_a_character_are_exact(server: Serving) -> None:
    euro = server.engine.tokenize("€")
    banned = {str(i): -100000 for i in range(96) if i != euro[0]}
    more = {"messages": MESSAGES, "logprobs": True, "logit_bias": banned, "max_tokens": 1}
    (choice,) = logprobs_of(server.openai.chat.completions, **more)
    (token,) = choice.logprobs.content
    assert (token.token, token.bytes) == ("\ufffd", list("€".encode()[:1]))


def test_an_answer_without_tokens_has_an_empty_list(server: Serving) -> None:
    answer = server.openai.chat.completions.create(
        model="any", messages=MESSAGES, logit_bias={"2": 100000}, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs.content == []


# -- plain prompts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "stream"), each([0, 1, 5, 20], [False, True]))
def test_log_probabilities_of_a_plain_prompt(server: Serving, count: int, stream: bool) -> None:
    """Also of the tokens of a stop string, which are told though their text is not."""
    for stop in ((), (expected(server, PROMPT, 0).text[6:9],)):
        answer = expected(server, PROMPT, count, stop=stop)
        parts = logprobs_of(server.openai.completions, prompt=PROMPT, logprobs=count, stream=stream, stop=list(stop))
        assert "".join(part.text for part in parts) == answer.text
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for part in parts:
            for name in told if part.logprobs is not None else ():
                told[name] += getattr(part.logprobs, name)
        ids = answer.token_ids
        assert told["tokens"] == [text(server, i) for i in ids]
        assert told["token_logprobs"] == pytest.approx([token.logprob for token in answer.logprobs], abs=1e-5)
        for entry, token in zip(told["top_logprobs"], answer.logprobs, strict=True):
            others = [*token.top, (token.id, token.logprob)]
            assert entry == pytest.approx({text(server, i): p for i, p in sorted(others, key=lambda o: o[1])}, abs=1e-5)
        whole = [server.engine.detokenize(ids[:count]).removesuffix("\ufffd") for count in range(len(ids))]
        assert told["text_offset"] == [len(before) for before in whole]


# -- refusals --------------------------------------------------------------------------------------------------


def test_every_number_is_finite(server: Serving) -> None:
    more = {"prompt": PROMPT, "logprobs": 20, "temperature": 100, "seed": 2, "logit_bias": {"7": -100}}
    (choice,) = logprobs_of(server.openai.completions, **more)
    assert all(math.isfinite(p) and p <= 0 for top in choice.logprobs.top_logprobs for p in top.values())
