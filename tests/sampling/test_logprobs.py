"""Log-probabilities of generated tokens: of the model's own distribution, one for each id, only if asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import Chunk, Completion, Engine, SamplingParams
from polarlm.engine.limits import MOST_LOGPROBS
from polarlm.engine.outputs import fold
from polarlm.engine.sampling.sample import token_logprob
from tests.bare import log_softmax, spread
from tests.pairs import each
from tests.tiny import VOCABULARY, assert_idle

BLOCK = 16
PROMPT = [9, 20, 33, 47, 5, 61, 72, 8, 90, 11, 12, 13, 50, 51, 52, 53, 54, 55]  # two blocks and a bit


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=BLOCK, kept_sequences=0) as engine:
        yield engine
        assert_idle(engine)


def asking(count: int | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": count, **more})


def rows_of(engine: Engine, prompt: list[int], answer: Completion) -> np.ndarray:
    """Logits (T, V) that teacher forcing gives for the answer's tokens."""
    return engine.score([*prompt, *answer.token_ids], logits=True).logits[len(prompt) - 1 : -1]


def tolerance(logits: np.ndarray) -> float:
    """A prompt reads its own K/V in float32, `score` in half precision, with a relative error of 2^-11 at most.

    So may be what is summed of them, and with it the logits, by their spread; a log-probability moves by twice as much,
    once with its own logit and once with the sum of all.
    """
    return 2 * 2.0**-11 * spread(logits)


def agree(told: Completion, logits: np.ndarray) -> None:
    """The reported log-probabilities are the log-softmax of these logits."""
    expected, allowed = log_softmax(logits), tolerance(logits)
    assert allowed < 0.05
    for token, row in zip(told.logprobs, expected, strict=True):
        assert abs(token.logprob - row[token.id]) <= allowed
        for other, logprob in token.top:
            assert abs(logprob - row[other]) <= allowed


# -- what they are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "count"), each([1, BLOCK, len(PROMPT)], [0, 1, MOST_LOGPROBS]))
def test_logprobs_match_teacher_forcing(engine: Engine, length: int, count: int) -> None:
    prompt = PROMPT[:length]
    answer = engine.generate(prompt, asking(count))
    scored = engine.score([*prompt, *answer.token_ids]).logprobs[length - 1 :]
    logits = rows_of(engine, prompt, answer)
    np.testing.assert_allclose([token.logprob for token in answer.logprobs], scored, rtol=0, atol=tolerance(logits))
    agree(answer, logits)
    assert {len(token.top) for token in answer.logprobs} == {count}


@pytest.mark.parametrize(
    "chain",
    [
        {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.0, "top_k": 2},
        {"repeat_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"logit_bias": {7: 50.0}},
        {"logit_bias": dict.fromkeys(range(5, 60), -math.inf)},
    ],
)
def test_logprobs_are_of_the_raw_distribution_whatever_the_sampling(engine: Engine, chain: dict[str, Any]) -> None:
    params = asking(5, seed=3, **chain)
    answer = engine.generate(PROMPT, params)
    agree(answer, rows_of(engine, PROMPT, answer))
    assert any(token.id != token.top[0][0] for token in answer.logprobs)  # the chain chose other than the model would


LOGITS = st.lists(
    st.one_of(st.integers(-40, 40).map(lambda i: i / 4), st.sampled_from([-math.inf, -3e38])), max_size=60
)
OFFSETS = st.sampled_from([0.0, 300.0, -3e4, 1e30])


@given(LOGITS, OFFSETS, st.data())
def test_the_most_likely_come_first_ties_by_id(others: list[float], offset: float, data: st.DataObject) -> None:
    """Without tokens of probability zero. Exponentials of some logits overflow, and the rounding of the largest hides
    their differences."""
    logits = np.float32([*others, 0.25]) + np.float32(offset)
    count = data.draw(st.integers(0, MOST_LOGPROBS))
    token = data.draw(st.integers(0, len(logits) - 1))
    told = token_logprob(logits, token, count)
    expected = log_softmax(logits)
    possible = [i for i in range(len(logits)) if logits[i] > -math.inf]
    assert told.id == token
    assert [i for i, _ in told.top] == sorted(possible, key=lambda i: (-logits[i], i))[:count]
    logprobs = [told.logprob, *(logprob for _, logprob in told.top)]
    assert logprobs == pytest.approx([expected[token], *(expected[i] for i, _ in told.top)], rel=1e-12, abs=1e-12)
    assert sum(math.exp(logprob) for _, logprob in told.top) <= 1 + 1e-12


def test_rows_of_the_head_that_are_not_tokens_are_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.model.tokenizer, "vocab_size", 20)
    answer = engine.generate([5, 6, 7], asking(20, temperature=50.0, top_k=0))
    for token in answer.logprobs:
        assert sorted(i for i, _ in token.top) == list(range(20))
        assert math.fsum(math.exp(logprob) for _, logprob in token.top) == pytest.approx(1, abs=1e-12)
        assert dict(token.top)[token.id] == token.logprob


# -- for whom they are, and where they come ----------------------------------------------------------------------


def test_no_logprobs_unless_asked_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise AssertionError("computed without being asked for")

    monkeypatch.setattr("polarlm.engine.sampling.sample.token_logprob", failing)
    answer = engine.generate(PROMPT, asking(None))
    assert answer.logprobs == ()
    assert len(answer.token_ids) == 30


def test_each_request_of_a_batch_gets_the_logprobs_it_asks_for(engine: Engine) -> None:
    asks = [None, 0, 3, None, MOST_LOGPROBS]
    jobs = [([5 + number] * (7 + 3 * number), asking(count)) for number, count in enumerate(asks)]
    alone = [engine.generate(*job) for job in jobs]
    trays: list[list[Any]] = [[] for _ in jobs]
    for job, tray in zip(jobs, trays, strict=True):
        engine.submit(*job, into=tray)
    while engine.work():
        pass
    for tray, expected, count, (prompt, _) in zip(trays, alone, asks, jobs, strict=True):
        answer = fold(tray)
        assert answer.token_ids == expected.token_ids
        assert len(answer.logprobs) == (0 if count is None else 30)
        assert {len(token.top) for token in answer.logprobs} <= {count}
        if count is not None:
            agree(answer, rows_of(engine, prompt, answer))


def paired(chunks: list[Chunk]) -> list[Chunk]:
    """Checks that every chunk's log-probabilities belong to its ids."""
    for chunk in chunks:
        assert tuple(token.id for token in chunk.logprobs) == chunk.token_ids
    return chunks


@pytest.mark.parametrize("at", [0, 5, 12])
def test_tokens_of_a_stop_string_have_logprobs(engine: Engine, at: int) -> None:
    whole = engine.generate(PROMPT, asking(2))
    stop = whole.text[at : at + 4]
    assert len(stop) == 4
    chunks = paired(list(engine.stream(PROMPT, asking(2, stop=(stop,)))))
    answer = fold(chunks)
    assert (answer.text, answer.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")
    assert answer.logprobs == whole.logprobs[: len(answer.token_ids)]
    assert len(engine.detokenize(answer.token_ids)) > len(answer.text)
    assert any(chunk.token_ids and not chunk.text for chunk in chunks)  # held back, its log-probability was not


def test_tokens_of_an_incomplete_character_have_logprobs(engine: Engine) -> None:
    euro = engine.tokenize("€")
    assert len(euro) == 3
    banned = {i: -math.inf for i in range(VOCABULARY) if i not in euro[:1]}
    chunks = paired(list(engine.stream(PROMPT, asking(1, logit_bias=banned, max_tokens=3))))
    assert chunks[0].text == ""
    assert fold(chunks).token_ids == (euro[0],) * 3
