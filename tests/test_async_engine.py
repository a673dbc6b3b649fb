"""Coroutines get the answers that threads get; cancelling one cancels its request, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm import AsyncEngine, Completion, Engine, EngineError, SamplingParams
from tests.tiny import assert_idle, ids

PATIENCE = 60  # seconds until a test that hangs fails
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    """An engine without kept sequences, so that no answer depends on those before it."""
    with Engine.load(tiny_path, device="cpu", block_size=16, kept_sequences=0) as engine:
        yield engine


def run(work: Callable[[AsyncEngine], Awaitable[Any]], engine: Engine) -> Any:
    async def main() -> Any:
        async with AsyncEngine(engine) as asynchronous:
            return await asyncio.wait_for(work(asynchronous), PATIENCE)

    return asyncio.run(main())


async def idle(engine: Engine) -> None:
    """Return when no request and no block is left: a cancelled request is removed by the next holder of the lock."""
    while True:
        try:
            return assert_idle(engine)
        except AssertionError:
            await asyncio.sleep(0.01)


def job(number: int) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(temperature=1.5, seed=number, max_tokens=10 + number, ignore_eos=True)
    return ids(number, 3 + 11 * number), params


@contextmanager
def few_units(engine: Engine) -> Iterator[None]:
    """While it holds, the engine computes a few units of work, so that an answer has begun and does not end."""
    work, left, goes_on = engine.work, iter(range(12)), threading.Event()

    def waits() -> bool:
        if next(left, None) is None:
            assert goes_on.wait(PATIENCE)
        return work()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "work", waits)
        try:
            yield
        finally:
            goes_on.set()


def test_it_does_what_the_engine_does(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    ids = list(range(5, 30))
    expected = engine.chat(messages, params), engine.embed("one two"), engine.score(ids)
    several = [answer.text for answer in engine.generate(["the end", "rain"], params, max_tokens=3)]

    async def work(asynchronous: AsyncEngine) -> tuple[Any, ...]:
        answers = await asynchronous.generate(["the end", "rain"], params, max_tokens=3)
        assert [answer.text for answer in answers] == several
        with pytest.raises(EngineError, match=r"^prompts\[1\]: "):
            await asynchronous.generate(["the end", [96]], params)
        return (
            await asynchronous.chat(messages, params),
            await asynchronous.embed("one two"),
            await asynchronous.score(ids),
        )

    chat, embedding, score = run(work, engine)
    assert chat.token_ids == expected[0].token_ids
    np.testing.assert_array_equal(embedding.vector, expected[1].vector)
    np.testing.assert_array_equal(score.logprobs, expected[2].logprobs)


def test_cancelling_a_task_cancels_its_request_and_no_other(engine: Engine) -> None:
    alone = engine.generate(*job(3))

    async def work(asynchronous: AsyncEngine) -> Completion:
        begun = asyncio.Event()

        async def endless() -> None:
            async for _ in asynchronous.stream([7, 8, 9], LONG):
                begun.set()

        with few_units(engine):
            task = asyncio.create_task(endless())
            await begun.wait()
            other = asyncio.create_task(asynchronous.generate(*job(3)))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        answer = await other
        await idle(engine)
        return answer

    assert run(work, engine).token_ids == alone.token_ids


def test_a_task_may_be_cancelled_while_its_prompt_is_tokenized(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, entered, released = engine.submit, threading.Event(), threading.Event()

    def slow(*request: Any, **more: Any) -> Any:
        entered.set()
        assert released.wait(PATIENCE)
        return submit(*request, **more)

    monkeypatch.setattr(engine, "submit", slow)

    async def work(asynchronous: AsyncEngine) -> None:
        task = asyncio.create_task(asynchronous.generate([7, 8, 9], LONG))
        await asyncio.to_thread(entered.wait, PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()
        await asyncio.sleep(0.05)
        await idle(engine)

    run(work, engine)


def test_leaving_a_stream_ends_its_request(engine: Engine) -> None:
    async def work(asynchronous: AsyncEngine) -> None:
        async with aclosing(asynchronous.stream([7, 8, 9], LONG)) as chunks:
            async for _ in chunks:
                break
        await idle(engine)

    run(work, engine)


def test_errors_come_where_the_answer_is_awaited(engine: Engine) -> None:
    async def work(asynchronous: AsyncEngine) -> None:
        with pytest.raises(EngineError, match="context") as caught:
            await asynchronous.generate([7] * 5000)
        assert caught.value.code == "context_length_exceeded"
        assert len((await asynchronous.generate(*job(1))).token_ids) == 11

    run(work, engine)


def test_an_error_of_the_engine_as_a_whole_reaches_everyone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise EngineError("The device is gone", "device_unavailable")

    async def work(asynchronous: AsyncEngine) -> None:
        monkeypatch.setattr(engine, "work", fails)
        for answer in await asyncio.gather(
            *(asynchronous.generate(*job(number)) for number in range(3)), return_exceptions=True
        ):
            assert isinstance(answer, EngineError)
            assert answer.code == "device_unavailable"
        monkeypatch.undo()
        assert len((await asynchronous.generate(*job(1))).token_ids) == 11

    run(work, engine)


def test_closing_ends_what_runs(engine: Engine) -> None:
    async def main() -> None:
        asynchronous = AsyncEngine(engine)
        stream = asynchronous.stream([7, 8, 9], LONG)
        with few_units(engine):
            await anext(stream)
            thread = asynchronous._thread
            closing = asyncio.create_task(asynchronous.close())
            while not thread._is_stopping:
                await asyncio.sleep(0.01)
        await closing
        with pytest.raises(EngineError, match="closed"):
            _ = [chunk async for chunk in stream]
        with pytest.raises(EngineError, match="closed"):
            await asynchronous.generate([7, 8, 9])
        await asynchronous.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_the_event_loop_runs_while_a_prompt_is_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of work ends only when the loop has run meanwhile."""
    began, has_run, compute = threading.Event(), threading.Event(), engine.work

    def waits() -> bool:
        began.set()
        assert has_run.wait(PATIENCE)
        return compute()

    async def work(asynchronous: AsyncEngine) -> None:
        monkeypatch.setattr(engine, "work", waits)
        task = asyncio.create_task(asynchronous.generate(list(range(5, 95)), SamplingParams(max_tokens=1)))
        while not began.is_set():
            await asyncio.sleep(0)
        has_run.set()
        assert len((await task).token_ids) == 1

    run(work, engine)


def test_event_loops_one_after_the_other_share_an_engine(tiny_path: Path) -> None:
    async def load() -> AsyncEngine:
        return await AsyncEngine.load(tiny_path, device="cpu", block_size=16, kept_sequences=0)

    asynchronous = asyncio.run(load())
    first, second = (asyncio.run(asynchronous.generate(*job(2))) for _ in range(2))
    assert first.token_ids == second.token_ids
    asyncio.run(asynchronous.close())
