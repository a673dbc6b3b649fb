"""64 clients at once and room for about eight: all are served, each as if it were alone, and nothing is lost.

POLARLM_LOAD_SECONDS=60 has the clients go on asking for a minute, POLARLM_LOAD_WEIGHTS=FOLDER takes another model.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.server.lines import PATIENCE, eventually
from tests.server.process import SMALL_BLOCKS, Process
from tests.tiny import VOCABULARY, make_model

CLIENTS = 64
SECONDS = float(os.environ.get("POLARLM_LOAD_SECONDS", "2.5"))  # for which clients go on asking, but for a first round
TOKENS = 24
BLOCK, CONTEXT = 8, 176  # room for 21 blocks behind first ones; a sequence of 40 tokens takes 4, shared ones included
CLEAR = 0.02  # a token that is ahead of the next one by so much is what comes out of any batch
MORE_MEMORY = 16 << 20  # bytes, on top of what the process has when everything has been used once


@dataclass(frozen=True)
class Job:
    """A prompt, and the beginning of its answer that does not hang on the last bits of a sum."""

    prompt: list[int]
    text: str


def prompts() -> list[list[int]]:
    """Every fourth with a beginning of its own, the others with one of two that they share."""
    rng = np.random.default_rng(0)
    shared = rng.integers(5, VOCABULARY, (2, 19)).tolist()
    ends = [rng.integers(5, VOCABULARY, length).tolist() for length in rng.integers(3, 20, CLIENTS)]
    return [rest if number % 4 == 0 else shared[number % 2] + rest for number, rest in enumerate(ends)]


@pytest.fixture(scope="module", params=["llama_gqa_linear", "qwen3_next_shared_keys"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with attention alone, and one with recurrent layers."""
    made = make_model(tmp_path_factory.mktemp("model"), request.param)
    return Path(os.environ.get("POLARLM_LOAD_WEIGHTS", made))


@pytest.fixture(scope="module")
def jobs(weights: Path) -> list[Job]:
    """What each prompt gives alone."""
    settings = {"device": "cpu", "cache_type": "f16", "state_type": "f32", "block_size": BLOCK, "kept_sequences": 0}
    with Engine.load(weights, **settings) as engine:
        ops, margins = engine._model.ops, []
        sample = ops.sample

        def watched(logits: np.ndarray, draws: Any, *more: Any) -> Any:
            second, best = np.partition(logits[-1, : draws[-1].vocabulary], -2)[-2:]
            margins.append(best - second)
            return sample(logits, draws, *more)

        ops.sample = watched
        made = []
        for prompt in prompts():
            margins.clear()
            stream = engine.stream(prompt, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
            texts = [chunk.text for chunk in stream]
            clear = next((i for i, margin in enumerate(margins) if margin < CLEAR), TOKENS)
            made.append(Job(prompt, "".join(texts[:clear])))
    assert sum(len(job.text) for job in made) > CLIENTS * TOKENS / 2  # there is something to compare
    return made


@pytest.fixture
def server(weights: Path, tmp_path: Path) -> Iterator[Process]:
    flags = ("--cache-type", "f16", "--state-type", "f32", "--parallel", "16", "--threads", "1")
    flags += ("--ctx-size", str(CONTEXT))
    empty = {CACHE_VARIABLE: str(tmp_path / "cache")}  # so that LLVM, which takes memory, is loaded at the start
    with Process(weights, tmp_path, *flags, prelude=SMALL_BLOCKS.format(kept=4), **empty) as process:
        yield process


async def ask(http: httpx.AsyncClient, prompt: list[int], tokens: int = TOKENS) -> tuple[str, str, dict[str, Any]]:
    """Text, finish reason and usage of a streamed answer that came to its proper end."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, reason, usage, last = "", "", {}, ""
    async with http.stream(
        "POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}
    ) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):  # the end of an event, or a sign of life
                continue
            last = line.removeprefix("data: ")
            if last == "[DONE]":
                continue
            event = json.loads(last)
            usage = event["usage"] or usage
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    assert last == "[DONE]"
    return text, reason, usage


@dataclass
class Seen:
    requests: int = 0
    cached: int = 0  # tokens of prompts
    least_free: int = 1 << 30  # blocks


async def load(process: Process, jobs: list[Job], seconds: float, seen: Seen) -> None:
    """All clients ask, each one request behind the other until the time is over."""
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=process.url, timeout=PATIENCE, limits=limits) as http:

        async def client(number: int) -> None:
            turn = 0
            while turn == 0 or time.monotonic() < until:
                job = jobs[(number + 7 * turn) % len(jobs)]
                text, reason, usage = await ask(http, job.prompt)
                assert text.startswith(job.text)
                assert (reason, usage["prompt_tokens"]) == ("length", len(job.prompt))
                assert usage["completion_tokens"] == TOKENS
                seen.requests += 1
                seen.cached += usage["prompt_tokens_details"]["cached_tokens"]
                turn += 1

        async def watch() -> None:
            while True:
                seen.least_free = min(seen.least_free, (await asyncio.to_thread(process.blocks))[1])
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        watching.cancel()


@pytest.mark.slow
def test_answers_under_load_are_the_same_as_alone_and_no_memory_is_lost(server: Process, jobs: list[Job]) -> None:
    seen = Seen()
    asyncio.run(load(server, jobs, 0, seen))
    before = server.resident()
    asyncio.run(load(server, jobs, SECONDS, seen))
    assert server.resident() - before < MORE_MEMORY
    for _ in range(5):
        if seen.least_free >= 4:  # who watches may have been late
            asyncio.run(load(server, jobs, 0, seen))
    assert seen.least_free < 4  # they did get in each other's way
    assert seen.cached > 0

    eventually(server.is_idle)
    done = server.get("/metrics")
    assert f'polarlm_requests_total{{outcome="length"}} {float(seen.requests)}\n' in done
    assert f"polarlm_completion_tokens_total {float(seen.requests * TOKENS)}\n" in done
    blocks, free = server.blocks()
    assert blocks == CONTEXT // BLOCK - 1
    assert free == blocks
    assert {line.get("outcome", "length") for line in server.log()} == {"length"}
