"""One engine for many threads, and for many streams in one thread: no stream hangs or gets another's text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polarlm.engine import Completion, Engine, SamplingParams
from polarlm.engine.outputs import fold
from tests.cpu import CpuOps
from tests.test_async_engine import PATIENCE, job
from tests.test_engine import fail_at
from tests.tiny import assert_idle, by_count, runs_nothing

THREADS = 6


@pytest.fixture
def shared_engine(tiny_path: Path) -> Iterator[Engine]:
    """An engine without kept sequences, so that no answer depends on those before it."""
    with Engine.load(tiny_path, device="cpu", block_size=8, kept_sequences=0) as engine:
        yield engine
        assert_idle(engine)


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """The results of `calls`, each in its own thread; raises TimeoutError if one does not return."""
    pool = ThreadPoolExecutor(len(calls))
    try:
        return [future.result(PATIENCE) for future in [pool.submit(call) for call in calls]]
    finally:
        pool.shutdown(wait=False)


def answers_alone(engine: Engine) -> list[Completion]:
    return [engine.generate(*job(number)) for number in range(THREADS)]


def same(answer: Completion, alone: Completion) -> bool:
    return (answer.text, answer.token_ids, answer.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)


def test_every_thread_gets_the_answer_that_it_gets_alone(shared_engine: Engine) -> None:
    alone = answers_alone(shared_engine)
    calls = [
        lambda number=number: [shared_engine.generate(*job(number)) for _ in range(3)] for number in range(THREADS)
    ]
    for expected, answers in zip(alone, in_threads(*calls), strict=True):
        assert all(same(answer, expected) for answer in answers)


def test_closed_streams_do_not_change_the_others(shared_engine: Engine) -> None:
    alone = answers_alone(shared_engine)

    def closing(number: int) -> None:
        for count in range(5):
            chunks = shared_engine.stream(*job(number))
            for _ in range(count):
                next(chunks)
            chunks.close()

    readers = [lambda number=number: shared_engine.generate(*job(number)) for number in range(3)]
    closers = [lambda number=number: closing(number) for number in range(3, THREADS)]
    answers = in_threads(*readers, *closers)[:3]
    assert all(same(answer, expected) for answer, expected in zip(answers, alone, strict=False))


def test_closing_the_engine_fails_the_streams_of_other_threads(tiny_path: Path) -> None:
    engine = Engine.load(tiny_path, device="cpu", block_size=8)
    begun = threading.Barrier(3)

    def read() -> str:
        chunks = engine.stream([5, 6, 7], SamplingParams(ignore_eos=True))
        next(chunks)
        begun.wait(PATIENCE)
        try:
            while True:  # the store may be full first
                fold(chunks)
                chunks = engine.stream([5, 6, 7], SamplingParams(ignore_eos=True))
        except Exception as error:
            return getattr(error, "code", repr(error))

    def close() -> None:
        begun.wait(PATIENCE)
        engine.close()

    assert in_threads(read, read, close) == ["closed", "closed", None]


@pytest.mark.parametrize(("call", "reason"), [(1, "cancelled"), (6, "cancelled"), (12, "length")])
def test_ctrl_c_ends_the_requests_of_the_unit_and_the_stream_that_is_read(
    shared_engine: Engine, monkeypatch, call: int, reason: str
) -> None:
    """A step of the first stream has nine products; the prompt of the second comes after it."""
    by_count(shared_engine, monkeypatch)
    first, second = shared_engine.stream(*job(2)), shared_engine.stream(*job(3))
    alone = shared_engine.generate(*job(1))
    assert next(first).token_ids
    fail_at(monkeypatch, shared_engine, call, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(second)  # its turn comes after the first one's, and so it works on that
    *_, last = first
    assert last.finish_reason == reason
    assert last.usage is not None
    assert runs_nothing(shared_engine)
    assert same(shared_engine.generate(*job(1)), alone)


@pytest.mark.parametrize("call", [2, 7])
def test_ctrl_c_in_the_prefill_of_another_stream(shared_engine: Engine, monkeypatch, call: int) -> None:
    first, second = shared_engine.stream(*job(5), progress=True), shared_engine.stream(*job(3))
    alone = shared_engine.generate(*job(1))
    monkeypatch.setattr(CpuOps, "prefill_rows", 16)
    assert next(first).prefilled
    fail_at(monkeypatch, shared_engine, call, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(second)
    assert [chunk.finish_reason for chunk in first][-1] == "cancelled"
    assert same(shared_engine.generate(*job(1)), alone)


def test_score_waits_for_the_streams_before_it(shared_engine: Engine) -> None:
    ids = job(5)[0] * 4
    scored = shared_engine.score(ids, logits=True)
    stream = shared_engine.stream(*job(5))
    chunks = [next(stream)]  # holds blocks that the score needs
    assert (shared_engine.score(ids, logits=True).logits == scored.logits).all()
    chunks += stream
    assert same(fold(chunks), shared_engine.generate(*job(5)))


def test_a_long_answer_does_not_starve_other_threads(shared_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that asks for the engine during a step of another one's answer has it before the next step."""
    step, order = shared_engine._model.step, list[str]()
    asks, times = threading.Semaphore(0), 20

    def stepping(*arguments):
        if len(order) < 2 * times:
            asks.release()
            deadline = time.monotonic() + PATIENCE
            while not shared_engine._lock._queue:
                assert time.monotonic() < deadline, "the other thread does not ask"
                time.sleep(0.001)
        order.append("step")
        return step(*arguments)

    def look() -> None:
        for _ in range(times):
            assert asks.acquire(timeout=PATIENCE)
            with shared_engine._exclusive():
                order.append("look")

    monkeypatch.setattr(shared_engine._model, "step", stepping)
    in_threads(lambda: shared_engine.generate([5, 6, 7], SamplingParams(max_tokens=2 * times, ignore_eos=True)), look)
    assert order[: 2 * times] == ["step", "look"] * times
