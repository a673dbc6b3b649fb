"""Tokens that a constraint leaves no choice of: taken without a step of their own, and the answer is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.outputs import Completion, fold
from polarlm.engine.requests.sampler import Sampler
from tests.sampling.constrained import InTurn
from tests.tiny import EOS, VOCABULARY, assert_idle, forget, rows_of_steps

BLOCK = 8
PROMPT = [9, 20, 33, 47, 5, 61, 72, 8, 90, 11]
ANEW = PromptOptions(cache_prompt=False)
FREE, SOME = None, range(5, 60)
RUN = [[number] for number in range(20, 20 + STEP_ROWS + 9)]  # longer than a step and than two blocks
SETS: list[Any] = [SOME, *RUN, FREE, [7], SOME, [8], [9], FREE]
PARAMS = SamplingParams(temperature=1.5, seed=3, max_tokens=70, ignore_eos=True)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    settings = {"device": "cpu", "block_size": BLOCK, "parallel": 4, "ctx_size": 160, "calibration": False}
    with Engine.load(tiny_path, cache_type="polarquant", **settings) as engine:
        yield engine
        assert_idle(engine)


@pytest.fixture
def rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    return rows_of_steps(engine, monkeypatch)


@pytest.fixture
def in_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """The result of a function that is called while every token has a step of its own."""

    def call(work: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "only_token", lambda sampler_inputs: None)
            return work()

    return call


def answer(engine: Engine, sets: Sequence[Any] = SETS, params: SamplingParams = PARAMS, **more: Any) -> Completion:
    forget(engine)
    return fold(engine.stream(PROMPT, params, ANEW, constraint=InTurn(sets, VOCABULARY, **more)))


def same(one: Completion, other: Completion) -> bool:
    """Whether two answers are equal, but for their times."""
    return (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)


@pytest.mark.parametrize(("temperature", "first"), [(0, 0), (1.5, 5), (1.5, BLOCK)])
def test_the_answer_is_that_of_a_step_for_each_token(
    engine: Engine, rows: list[list[int]], in_steps: Any, temperature: float, first: int
) -> None:
    """Runs that begin anywhere in a block, with drawn tokens between them: these show what the run has left."""
    params, sets = replace(PARAMS, temperature=temperature), [*[FREE] * first, *SETS]
    wanted = in_steps(lambda: answer(engine, sets, params))
    assert set(map(tuple, rows)) == {(1,)}
    count = len(rows)
    rows.clear()
    assert same(answer(engine, sets, params), wanted)
    assert len(rows) < count * 2 / 3
    assert max(rows) == [BLOCK]  # never beyond the end of a block, whose codes the next row reads


def test_rows_of_a_step_are_limited(tiny_path: Path, monkeypatch: pytest.MonkeyPatch, in_steps: Any) -> None:
    with Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=64, calibration=False) as engine:
        wanted = in_steps(lambda: answer(engine))
        seen = rows_of_steps(engine, monkeypatch)
        assert same(answer(engine), wanted)
        assert [STEP_ROWS] < max(seen) <= [64]  # of a request alone, up to the end of the block
        assert_idle(engine)


def test_log_probabilities_have_a_step_for_each_token(engine: Engine, rows: list[list[int]], in_steps: Any) -> None:
    params = replace(PARAMS, temperature=0, logprobs=2)
    found = answer(engine, params=params)
    assert set(map(tuple, rows)) == {(1,)}
    assert len(found.logprobs) == len(found.token_ids)
    assert found.token_ids == answer(engine, params=replace(params, logprobs=None)).token_ids


def test_what_ends_an_answer_may_end_a_run(engine: Engine, in_steps: Any) -> None:
    text = engine.detokenize([20, 21, 22, 23, 24])
    cases: list[tuple[SamplingParams, dict[str, Any], int]] = [
        *((replace(PARAMS, max_tokens=count), {}, count) for count in (1, 2, 5)),
        (replace(PARAMS, stop=(text[2:4],)), {}, 5),
        (PARAMS, {"count": 7}, 7),
        (replace(PARAMS, stop_token_ids=(26,)), {}, 7),
    ]
    for params, more, tokens in cases:
        found = answer(engine, params=params, **more)
        assert same(found, in_steps(lambda params=params, more=more: answer(engine, params=params, **more)))
        assert len(found.token_ids) == tokens
        assert found.finish_reason == ("length" if tokens == params.max_tokens else "stop")
    ended = [SOME, [20], [21], EOS[:1]]
    params = replace(PARAMS, ignore_eos=False)
    found = answer(engine, ended, params)
    assert (found.finish_reason, len(found.token_ids)) == ("stop", 3)
    assert same(found, in_steps(lambda: answer(engine, ended, params)))


@pytest.mark.parametrize(
    "more", [{"logit_bias": {22: -np.inf}}, {"min_tokens": 9, "stop_token_ids": (22,)}], ids=["bias", "min_tokens"]
)
def test_a_token_that_is_banned_is_not_taken(engine: Engine, in_steps: Any, more: dict[str, Any]) -> None:
    def tokens() -> list[tuple[int, ...]]:
        tray: list[Any] = []
        engine.submit(PROMPT, replace(PARAMS, **more), ANEW, into=tray, constraint=InTurn(SETS, VOCABULARY))
        while engine.work():
            pass
        *chunks, error = tray
        assert isinstance(error, EngineError)
        assert "bans every token that could come next" in str(error)
        return [chunk.token_ids for chunk in chunks]

    found = tokens()
    assert len(found) == 3
    assert found == in_steps(tokens)


def test_the_next_turn_finds_what_is_stored(engine: Engine, in_steps: Any) -> None:
    """An answer may end with tokens that no step has computed."""

    def turns() -> tuple[Completion, Completion]:
        forget(engine)
        constraint = InTurn([SOME, *RUN], VOCABULARY, count=len(RUN) + 1)
        first = fold(engine.stream(PROMPT, PARAMS, constraint=constraint))
        turn = [*PROMPT, *first.token_ids, 30, 31]
        return first, engine.generate(turn, replace(PARAMS, temperature=0, max_tokens=9))

    first, second = turns()
    assert len(first.token_ids) == len(RUN) + 1
    assert second.usage.cached_tokens >= len(PROMPT)
    assert len(second.token_ids) == 9
