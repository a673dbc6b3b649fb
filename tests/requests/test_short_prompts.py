"""Prompts of which the store lacks a few tokens: they are rows of a step, and the answer is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.outputs import fold
from tests.requests.drafters import first_difference, margin
from tests.tiny import assert_idle, by_count, make_model, preempt, rows_of_steps

BLOCK = 32
BEFORE = [5 + number * 7 % 90 for number in range(70)]  # two blocks and six tokens
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ANEW = PromptOptions(cache_prompt=False)


def load(path: Path, **more: Any) -> Engine:
    settings = {"device": "cpu", "block_size": BLOCK, "cache_type": "f16", "calibration": False, "parallel": 4}
    return Engine.load(path, **{**settings, **more})


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with load(tiny_path) as engine:
        yield engine
        assert_idle(engine)


def turn(count: int) -> list[int]:
    return [11 + number * 5 % 80 for number in range(count)]


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets "prompt" for each prompt, and the rows of each span of each step."""
    seen: list[Any] = rows_of_steps(engine, monkeypatch)
    chunks = engine._model.chunks
    monkeypatch.setattr(engine._model, "chunks", lambda batch: seen.append("prompt") or chunks(batch))
    return seen


@pytest.mark.parametrize(
    ("before", "count", "first"),
    [
        (70, 1, [1]),
        (70, STEP_ROWS, [STEP_ROWS]),
        (70, STEP_ROWS + 1, "prompt"),
        (0, 5, [5]),  # a first prompt
        (64, STEP_ROWS, [STEP_ROWS]),  # a block begins
        (90, 6, [6]),  # a block ends
        (90, 7, "prompt"),  # whose last token would see the others' codes
    ],
)
def test_a_few_tokens_of_the_current_block_are_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, before: int, count: int, first: Any
) -> None:
    """The answer is a prompt's, but for roundings: on a CPU tokens of a prompt see each other in float32."""
    history = [*BEFORE, *turn(30)][:before]
    if before:
        engine.generate(history, replace(GREEDY, max_tokens=0))
    ids, seen = [*history, *reversed(turn(count))], watched(engine, monkeypatch)
    answer = engine.generate(ids, GREEDY)
    assert answer.usage.cached_tokens == before
    assert seen == [first, *[[1]] * (len(seen) - 1)]
    wanted = engine.generate(ids, GREEDY, ANEW).token_ids
    place = first_difference(answer.token_ids, wanted)
    assert place is None or margin(engine, ids, GREEDY, place) < 0.02


def test_short_turns_join_the_steps_of_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait, up to the rows of one sequence; those behind them join the next step. They report progress."""
    by_count(engine, monkeypatch)
    before = BEFORE[: 2 * BLOCK]
    engine.generate(before, replace(GREEDY, max_tokens=0))
    running = engine.stream([90, *BEFORE], replace(GREEDY, max_tokens=40))
    chunks = [next(running), next(running)]
    seen, counts, trays = watched(engine, monkeypatch), (10, 9, 4), [list[Any]() for _ in range(3)]
    for count, tray in zip(counts, trays, strict=True):
        engine.submit([*before, count, *turn(count - 1)], GREEDY, into=tray, progress=True)
    while engine.work():
        pass
    assert [rows for rows in seen if max(rows) > 1] == [[1, 10, 9], [1, 1, 1, 4]]
    assert len(fold([*chunks, *running]).token_ids) == 40
    for count, (progress, *tray) in zip(counts, trays, strict=True):
        assert (progress.prefilled, progress.cached_tokens) == (len(before) + count, len(before))
        ids, answer = [*before, count, *turn(count - 1)], fold(tray).token_ids
        place = first_difference(answer, engine.generate(ids, GREEDY, ANEW).token_ids)
        assert place is None or margin(engine, ids, GREEDY, place) < 0.02


def test_short_prompts_that_wait_are_rows_of_the_same_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All before the first long one, while no answer waits for a step. Compiled kernels compute the same as one by
    one."""
    params, prompts = replace(GREEDY, logprobs=1), [turn(16), [5, *turn(15)], [6, *turn(3)], [7, *turn(29)]]
    alone = [engine.generate(prompt, params, ANEW) for prompt in prompts]
    seen, trays = watched(engine, monkeypatch), [list[Any]() for _ in prompts]
    for prompt, tray in zip(prompts, trays, strict=True):
        engine.submit(prompt, params, ANEW, into=tray)
    while engine.work():
        pass
    assert seen[0] == [16, 16, 4]
    for answer, wanted in zip(map(fold, trays), alone, strict=True):
        assert answer.token_ids == wanted.token_ids
        off = [
            abs(ours.logprob - theirs.logprob) for ours, theirs in zip(answer.logprobs, wanted.logprobs, strict=True)
        ]
        assert max(off) <= 1e-5 * (engine.status().backend == "numpy")


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama_gqa_linear", {"max_tokens": 0}),
        ("llama_gqa_linear", {"prompt_logprobs": 1}),
        ("qwen3_5_tied", {}),  # snapshots of recurrent layers are a prompt's
    ],
)
def test_what_needs_a_prompt_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, more: Any) -> None:
    with load(make_model(tmp_path, model)) as engine:
        seen = watched(engine, monkeypatch)
        engine.generate(turn(5), replace(GREEDY, **more))
        assert seen[0] == "prompt"
        assert_idle(engine)


@pytest.mark.parametrize("works", [1, 2, 6])
def test_a_preempted_one_goes_on_where_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch, works: int) -> None:
    """Before its first token it is a step again; later its keys and values are rounded as that step rounded them."""
    wanted, tray = engine.generate(turn(9), GREEDY).token_ids, list[Any]()
    monkeypatch.setattr(type(engine._store.plan), "copy_bytes", 0)
    engine.submit(turn(9), GREEDY, ANEW, into=tray)
    for _ in range(works):
        engine.work()
    preempt(engine)
    as_steps, open_batch = list[bool](), engine._store.open_batch

    def opened(*given: Any, **more: Any) -> Any:
        as_steps.append(more["as_steps"])
        return open_batch(*given, **more)

    monkeypatch.setattr(engine._store, "open_batch", opened)
    while engine.work():
        pass
    assert fold(tray).token_ids == wanted
    assert as_steps == [True] * {1: 0, 2: 1, 6: 2}[works]
