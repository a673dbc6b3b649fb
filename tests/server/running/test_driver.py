"""Streaming from an engine that computes in another thread: nothing is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, EngineError, SamplingParams
from polarlm.engine.outputs import fold
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.server.config import ServerConfig
from polarlm.server.running import journal
from polarlm.server.running.counters import Totals
from polarlm.server.running.driver import Driver
from polarlm.server.running.job import Job, Worker
from polarlm.server.running.readers import _THREADS
from polarlm.server.running.refusals import Refusal
from tests.server.lines import PATIENCE

pytestmark = pytest.mark.anyio

PROMPT = [7, 8, 9]


def greedy(tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


LONG = greedy(200)


@asynccontextmanager
async def driving(engine: Engine, **settings: Any) -> AsyncIterator[Driver]:
    driver = Driver(engine, ServerConfig(**settings))
    await driver.start()
    try:
        yield driver
    finally:
        await driver.stop()


async def whole(driver: Driver, prompt: Any = PROMPT, params: SamplingParams | None = None) -> Completion:
    async with aclosing(driver.stream(prompt, params or greedy())) as chunks:
        return fold([chunk async for chunk in chunks])


async def until_idle(driver: Driver) -> None:
    async def wait() -> None:
        while (status := await driver.status()).running or status.waiting or status.blocks_used:
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), PATIENCE)


@asynccontextmanager
async def driving_until_idle(engine: Engine, request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    async with driving(engine, **getattr(request, "param", {})) as made:
        yield made
        await until_idle(made)
        assert made.snapshot().active == 0


@pytest.fixture
async def driver(engine: Engine, request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    """By the end the engine is idle, and so is the driver."""
    async with driving_until_idle(engine, request) as made:
        yield made


@pytest.fixture
async def keeping(tiny: Engine, request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    """Of an engine that keeps what it has computed."""
    async with driving_until_idle(tiny, request) as made:
        yield made


def configured(**settings: Any) -> pytest.MarkDecorator:
    """A test's driver has these settings of ServerConfig."""
    return pytest.mark.parametrize("driver", [settings], indirect=True, ids=str)


# -- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeping", [{}, {"max_tokens": 5}], indirect=True)
async def test_a_limit_of_the_models_counts_where_nobody_named_one(
    keeping: Driver, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "model", replace(tiny.model, generation=GenerationDefaults(max_tokens=3)))
    prompt, of_server = [7] * (tiny.context - 40), keeping.config.max_tokens
    for asked, generated in ((None, of_server or 3), (-1, of_server or 40), (9, of_server or 9), (4, 4)):
        answer = await whole(keeping, prompt, replace(greedy(), max_tokens=asked))
        assert (answer.usage.completion_tokens, answer.finish_reason) == (generated, "length")


async def test_a_snapshot_stays_as_it_is(keeping: Driver) -> None:
    before, prompt = keeping.snapshot(), [*range(5, 40)]
    assert [(await whole(keeping, prompt)).usage.cached_tokens for _ in range(2)] == [0, 34]
    assert before == Totals()
    assert keeping.snapshot().cached_from == {"store": 34}


@asynccontextmanager
async def slow_prompts(driver: Driver, prompt: Any) -> AsyncIterator[None]:
    """Meanwhile as many requests with this prompt as there are tokenizers wait to be read."""
    released, waiting = threading.Event(), threading.Semaphore(0)

    def slow(_: Any, *arguments: Any, **more: Any) -> Any:
        waiting.release()
        assert released.wait(PATIENCE)
        return driver.engine.submit(PROMPT, *arguments, **more)

    async def answer() -> Completion:
        async with aclosing(driver.stream(prompt, greedy(), submit=slow)) as chunks:
            return fold([chunk async for chunk in chunks])

    answers = [asyncio.create_task(answer()) for _ in range(_THREADS)]
    for _ in answers:
        await asyncio.to_thread(waiting.acquire)
    try:
        yield
    finally:
        released.set()
        await asyncio.gather(*answers)


async def test_the_status_waits_for_no_slow_prompt(keeping: Driver) -> None:
    async with slow_prompts(keeping, PROMPT):
        assert (await asyncio.wait_for(keeping.status(), PATIENCE / 2)).running == 0


async def test_a_text_waits_for_no_images(keeping: Driver) -> None:
    shown = [{"role": "user", "content": [{"type": "image", "image": b""}]}]
    async with slow_prompts(keeping, shown):
        await asyncio.wait_for(whole(keeping, PROMPT, greedy()), PATIENCE / 2)


async def test_the_journal_says_what_a_cancelled_request_found_in_the_cache(keeping: Driver) -> None:
    prompt = [*range(5, 40)]
    await whole(keeping, prompt)
    with journal.entry("client", "route") as entry:
        async with aclosing(keeping.stream(prompt, LONG)) as chunks:
            await anext(chunks)  # it is accepted
            await anext(chunks)
    assert (entry.line()["outcome"], entry.line()["cached_tokens"]) == ("cancelled", 34)  # all but the last


@configured(log_prompts=True)
async def test_prompts_are_in_the_journal_only_where_asked(driver: Driver) -> None:
    with journal.entry("client", "route") as entry:
        answer = await whole(driver, "once")
    assert (entry.line()["prompt"], entry.line()["answer"]) == ("once", answer.text)


async def test_requests_without_an_answer_do_not_count_in_the_mean_time(driver: Driver) -> None:
    await whole(driver)
    await driver.run_counted("tokenized", lambda: time.sleep(0.05))
    assert sum(driver.snapshot().requests.values()) == 2
    assert driver.snapshot().seconds - driver._totals.answer_seconds >= 0.05
    with pytest.raises(EngineError):
        await whole(driver, [10**9])
    assert driver.snapshot().requests["error"] == 1
    assert driver._totals.answers == 1


# -- requests that nobody wants any more -----------------------------------------------------------------------


@pytest.mark.usefixtures("slow_steps")
async def test_a_client_that_leaves_while_its_prompt_is_tokenized(driver: Driver, engine: Engine, monkeypatch) -> None:
    begun, go_on, submit = threading.Event(), threading.Event(), engine.submit
    submitted = threading.Event()

    def held_up(*arguments: Any, **more: Any) -> Any:
        begun.set()
        assert go_on.wait(PATIENCE)
        try:
            return submit(*arguments, **more)
        finally:
            submitted.set()

    monkeypatch.setattr(engine, "submit", held_up)
    task = asyncio.create_task(whole(driver, params=LONG))
    await asyncio.to_thread(begun.wait, PATIENCE)
    task.cancel()
    await asyncio.wait([task])
    go_on.set()
    await asyncio.to_thread(submitted.wait, PATIENCE)
    await until_idle(driver)
    assert driver.snapshot().completion_tokens == 0


@pytest.mark.usefixtures("slow_steps")
async def test_the_time_limit_holds_for_a_client_that_does_not_read(engine: Engine) -> None:
    for seconds in (0.1, 1.0, 10.0):
        begun = False
        async with driving(engine, request_seconds=seconds) as driver:
            chunks = driver.stream(PROMPT, LONG)
            with suppress(Refusal):  # its first token may be late
                await anext(chunks)
                await anext(chunks)
                begun = True
            await until_idle(driver)
            await chunks.aclose()
        if begun:
            break
    assert begun


# -- more than there is room for -------------------------------------------------------------------------------


@configured(max_queue=0)
async def test_refused_clients_get_different_times_to_come_back(driver: Driver) -> None:
    """Those who were refused together: a client does as it is told, and room for one is room for one."""

    begun = [asyncio.create_task(whole(driver)) for _ in range(2)]
    await asyncio.sleep(0)
    told = set()
    for _ in range(50):
        with pytest.raises(Refusal) as caught:
            await whole(driver)
        told.add(caught.value.retry_after)
    assert len(told) > 2
    assert min(told) >= 1
    await asyncio.gather(*begun)


# -- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slow_steps")
async def test_draining_has_an_end(driver: Driver) -> None:
    chunks = driver.stream(PROMPT, LONG)
    await anext(chunks)
    await anext(chunks)
    await driver.drain(0)
    with pytest.raises(Refusal) as caught:
        async for _ in chunks:
            pass
    assert caught.value.code == "closing"


@pytest.mark.usefixtures("slow_steps")
async def test_stopping_ends_what_runs(engine: Engine) -> None:
    async with driving(engine) as driver:
        task = asyncio.create_task(whole(driver, params=LONG))
        while not (await driver.status()).running:
            await asyncio.sleep(0)
    with pytest.raises(Refusal) as caught:
        await task
    assert caught.value.code == "closing"
    assert engine.generate(PROMPT, greedy(3)).finish_reason == "length"  # the engine lives on


# -- what goes wrong -------------------------------------------------------------------------------------------


async def test_an_error_of_the_engine_as_a_whole_ends_no_thread(driver: Driver, engine: Engine, monkeypatch) -> None:
    work, broken = engine.work, threading.Event()

    def broken_once() -> bool:
        if engine.status().waiting and not broken.is_set():
            broken.set()
            raise ArithmeticError
        return work()

    monkeypatch.setattr(engine, "work", broken_once)
    with pytest.raises(Refusal) as caught:
        await whole(driver)
    assert caught.value.code == "internal"
    assert (await whole(driver)).finish_reason == "length"


class Panic(BaseException):
    """As PyO3 raises it for a panic of a library in Rust."""


def panic() -> None:
    raise Panic("index out of bounds")


async def test_whatever_a_job_raises_its_coroutine_hears_of_it_and_the_thread_goes_on() -> None:
    worker, loop = Worker("jobs"), asyncio.get_running_loop()
    job, next_one = Job(loop), Job(loop)
    worker.submit(panic)
    worker.submit(lambda: job.do(panic))
    worker.submit(lambda: next_one.do(lambda: "done"))
    with pytest.raises(RuntimeError, match="Panic: index out of bounds"):
        await job.next()
    assert await next_one.next() == "done"
    assert worker.stop(PATIENCE)
    with pytest.raises(SystemExit):
        job.do(sys.exit)
