"""Many requests at once: shared steps, fair shares of time, and preemption without any effect on answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, PromptOptions, SamplingParams
from polarlm.engine.outputs import Chunk, fold
from polarlm.engine.state.plan import StorePlan
from tests.cpu import CpuOps
from tests.tiny import assert_idle, blocks_left, by_count, forget, ids, preempt, preemptions, rows_of_steps

BLOCK = 16
REQUESTS = 5


@pytest.fixture
def engine(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine in full precision, so that recomputed K/V differ in rounding only."""
    settings = {
        "device": "cpu",
        "block_size": BLOCK,
        "kept_sequences": 1,
        "cache_type": "f16",
        "parallel": 4,
        "weight_type": "f32",
    }
    with Engine.load(tiny_path, **settings) as engine:
        by_count(engine, monkeypatch)
        yield engine
        assert_idle(engine)


def job(number: int, tokens: int = 40) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(temperature=1.5, seed=number, max_tokens=tokens, ignore_eos=True)
    return ids(number, 17 + 13 * number), params


def all_at_once(engine: Engine) -> list[Completion]:
    """The answers of streams that are all opened before any is read to its end."""
    streams = [engine.stream(*job(number)) for number in range(REQUESTS)]
    begun: list[list[Chunk]] = [[next(stream)] for stream in streams]
    return [fold([*chunks, *stream]) for chunks, stream in zip(begun, streams, strict=True)]


def test_batched_requests_get_the_answers_that_they_get_alone(engine: Engine, monkeypatch) -> None:
    alone = [engine.generate(*job(number)) for number in range(REQUESTS)]
    forget(engine)
    seen = rows_of_steps(engine, monkeypatch)
    for answer, expected in zip(all_at_once(engine), alone, strict=True):
        assert (answer.text, answer.token_ids, answer.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
    assert max(map(len, seen)) == 4  # `parallel`
    assert sum(map(sum, seen)) == sum(len(answer.token_ids) - 1 for answer in alone)


@pytest.mark.parametrize(
    ("type", "spare", "copies"),
    [
        ("f16", 0, False),
        ("polarquant", 0, True),
        ("polarquant", 8, False),
    ],
)
def test_preemption_does_not_change_answers(tiny_path: Path, monkeypatch, type: str, spare: int, copies: bool) -> None:
    """With codes as well: a preempted request goes on from a copy; without one, it reuses no more of its prompt than at
    first, as it read the rest in full precision."""
    monkeypatch.setattr(StorePlan, "copy_bytes", copies << 30)
    block = 8  # of NumPy alone, whose rows of prompts and of steps are rounded alike
    settings = {"device": "cpu", "block_size": block, "cache_type": type, "calibration": False, "parallel": 4}
    with Engine.load(tiny_path, **settings) as engine:
        alone = [engine.generate(*job(number)) for number in range(REQUESTS)]
        by_count(engine, monkeypatch)
        forget(engine)
        longest = (len(job(REQUESTS - 1)[0]) + 40) // block
        preempted, again, open_batch = preemptions(engine, monkeypatch), [], engine._store.open_batch

        def opened(*arguments: Any, as_steps: bool, **more: Any) -> Any:
            again.append(as_steps)
            return open_batch(*arguments, as_steps=as_steps, **more)

        monkeypatch.setattr(engine._store, "open_batch", opened)
        with blocks_left(engine, longest + spare):  # little more than the longest request needs
            answers = all_at_once(engine)
        assert any(again) != copies  # what follows prompts
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
        assert any(preempted)
        assert None not in preempted
        assert_idle(engine)


def test_a_preempted_request_does_not_report_progress_again(engine: Engine) -> None:
    """A client would draw a progress bar in the middle of the answer."""
    params, anew = SamplingParams(max_tokens=20, ignore_eos=True), PromptOptions(cache_prompt=False)
    chunks = engine.stream([*range(5, 45)], params, anew, progress=True)
    seen = [next(chunk for chunk in chunks if chunk.token_ids)]
    preempt(engine)
    seen += chunks
    assert sum(len(chunk.token_ids) for chunk in seen) == 20
    assert [chunk.prefilled for chunk in seen] == [0] * 20


def test_a_prefix_hit_may_be_overwritten_while_a_request_waits_for_room(engine: Engine) -> None:
    """The first token comes after the whole prompt is computed, whatever the first match found."""
    late, greedy = [5, *range(6, 90)], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = engine.generate(late, greedy)
    forget(engine)
    engine.generate([5, 90, 91], greedy)  # begins like the late one
    large, small = Tray(), Tray()
    engine.submit([7] * 220, greedy, into=large)
    while engine.status().running == 0:
        engine.work()
    waiting = engine.submit(late, greedy, into=small)
    while waiting.cached_tokens() == 0:
        assert engine.work()
    assert waiting.cached_tokens() == 1
    assert engine.status().waiting == 1  # there was no room
    forget(engine)
    while engine.work():
        pass
    assert large.answer.finish_reason == "length"
    assert small.answer.token_ids == alone.token_ids
    assert small.answer.usage.cached_tokens == 0


def test_a_long_prompt_does_not_stall_running_requests(engine: Engine, monkeypatch) -> None:
    monkeypatch.setattr(CpuOps, "prefill_rows", 16)
    seen = rows_of_steps(engine, monkeypatch)
    short = engine.stream(*job(0, tokens=30))
    next(short)
    long = engine.stream(list(range(5, 90)) * 2, SamplingParams(max_tokens=1, ignore_eos=True), progress=True)
    units = sum(1 for chunk in long if not chunk.token_ids)
    assert units > 10
    assert len(seen) >= min(units, 29)  # a step between any two units
    fold(short)


def test_a_short_prompt_does_not_wait_for_a_step_after_each_layer(engine: Engine, monkeypatch) -> None:
    """Otherwise, with many layers and short answers, requests would finish faster than new ones could join."""
    running = engine.stream(*job(0))
    next(running)
    seen = rows_of_steps(engine, monkeypatch)
    units = list(engine.stream([*range(5, 90)], SamplingParams(max_tokens=1, ignore_eos=True), progress=True))
    assert [chunk.prefilled for chunk in units[:-1]] == [85]  # both layers in one
    assert len(seen) <= 2
    fold(running)


def test_an_error_in_a_step_fails_the_requests_of_the_step(engine: Engine, monkeypatch) -> None:
    streams = [engine.stream(*job(number)) for number in range(3)]
    for stream in streams:
        next(stream)

    def failing(*given):
        raise ZeroDivisionError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "step", failing)
        for stream in streams:
            with pytest.raises(ZeroDivisionError, match="broken"):
                list(stream)
    assert len(engine.generate(*job(5)).token_ids) == 40


class Tray(list):
    """The outbox of a submitted request."""

    @property
    def answer(self) -> Completion:
        return fold(self)
