"""64 clients that mix dialects, schemas, tools, embeddings and cancels, and room for about eight: no error of the
server's, greedy answers are as if each were alone, and nothing is left behind.

POLARLM_LOAD_SECONDS=60 has the clients go on asking for a minute, POLARLM_LOAD_WEIGHTS=FOLDER takes another model.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.server.apis import APIS, events
from tests.server.lines import PATIENCE, eventually
from tests.server.process import SMALL_BLOCKS, Process
from tests.tiny import VOCABULARY, make_model

CLIENTS = 64
SECONDS = float(os.environ.get("POLARLM_LOAD_SECONDS", "4"))  # for which clients go on asking, but for a first round
TOKENS = 24
BLOCK, CONTEXT = 8, 176  # room for 21 blocks behind first ones; a sequence of 40 tokens takes 4, shared ones included
CLEAR = 0.02  # a token that is ahead of the next one by so much is what comes out of any batch
MORE_MEMORY = 16 << 20  # bytes, on top of what the process has when everything has been used
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
NONE = {"type": "integer", "minimum": 3, "maximum": 1}
TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
# What requests ask for, and the pattern that the whole text of the answer then matches; "" for none.
ASKED: list[tuple[dict[str, Any], str]] = [
    *(({"temperature": temperature, "max_tokens": tokens}, "") for temperature in (0, 1) for tokens in (1, 12, 30)),
    ({"schema": NUMBER, "max_tokens": 30}, "[1-9][0-9]"),
    ({"schema": NONE}, ""),
    ({"tools": [TOOL]}, ""),
]
RAW: list[tuple[dict[str, Any], str]] = [  # OpenAI's completions have no schema
    ({"n": 2}, ""),
    ({"guided_regex": "[a-f]{3,9}", "max_tokens": 30}, "[a-f]{3,9}"),
    ({"grammar": 'root ::= "the " [a-f]+ " end" | "none"', "max_tokens": 30}, ""),
]


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
    flags += ("--ctx-size", str(CONTEXT), "--max-queue", str(4 * CLIENTS))
    empty = {CACHE_VARIABLE: str(tmp_path / "cache")}  # so that LLVM, which takes memory, is loaded at the start
    with Process(weights, tmp_path, *flags, prelude=SMALL_BLOCKS.format(kept=4), **empty) as process:
        yield process


async def greedy(http: httpx.AsyncClient, rng: random.Random, job: Job, seen: Counter[str]) -> None:
    """A request whose answer is known."""
    api, stream = APIS["completions"], rng.random() < 0.5
    body = api.body(job.prompt, stream=stream, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    answer = await http.post(api.path, json=body)
    assert answer.status_code == 200, answer.text
    reply = api.streamed(events(answer.text)) if stream else api.whole(answer.json())
    assert reply.text.startswith(job.text)
    assert (reply.reason, reply.prompt_tokens, reply.completion_tokens) == ("length", len(job.prompt), TOKENS)
    seen["cached"] += reply.cached_tokens or 0


def messages(rng: random.Random) -> list[dict[str, Any]]:
    """Of a few conversations, so that beginnings are found in the cache."""
    words = ["the rain", "then he", "an onion", "in the end"]
    turns = rng.randrange(3)
    said = [{"role": ("user", "assistant")[i % 2], "content": words[(turns + i) % 4]} for i in range(2 * turns)]
    return [*said, {"role": "user", "content": rng.choice(words)}]


async def other(http: httpx.AsyncClient, rng: random.Random, seen: Counter[str]) -> None:
    """A request of any kind, which is sometimes given up before its end."""
    said, stream, api, pattern = messages(rng), rng.random() < 0.5, None, ""
    if rng.random() < 0.1:
        path, field = rng.choice((("/v1/embeddings", "input"), ("/tokenize", "content")))
        body = {field: said[0]["content"]}
    else:
        name = rng.choice(list(APIS))
        api = APIS[name]
        more, pattern = rng.choice(RAW if name == "completions" else ASKED)
        path, body = api.path, api.body(said[-1]["content"] if api.is_raw else said, stream=stream, **more)
    gives_up = rng.random() < 0.2
    where = f"{path} {json.dumps(body)}"
    try:
        answer = await asyncio.wait_for(http.post(path, json=body), rng.random() * 0.3 if gives_up else PATIENCE)
    except asyncio.TimeoutError:
        assert gives_up, where
        seen["given up"] += 1
        return
    text = answer.text
    assert answer.status_code in (200, 400), f"{where} → {answer.status_code} {text}"
    # A streamed response whose prompt is too long has the status 200 and is one that failed.
    refused = answer.status_code == 400 or '"context_length_exceeded"' in text
    seen["refused" if refused else "answered"] += 1
    if refused:
        assert not pattern, f"{where} → {text}"
        return
    assert '"internal"' not in text, f"{where} → {text}"
    if api is not None:
        reply = api.streamed(events(text)) if stream else api.whole(json.loads(text))
        seen["constrained"] += bool(pattern)
        assert not pattern or re.fullmatch(pattern, reply.text), f"{where} → {text}"


async def load(process: Process, jobs: list[Job], seconds: float, seen: Counter[str]) -> int:
    """All clients ask, each one request behind the other until the time is over; the least blocks that were free."""
    until = time.monotonic() + seconds
    limits, least = httpx.Limits(max_connections=CLIENTS), 1 << 30
    async with httpx.AsyncClient(base_url=process.url, timeout=PATIENCE, limits=limits) as http:

        async def client(number: int) -> None:
            rng, turn = random.Random(number), 0
            while turn < 2 or time.monotonic() < until:
                await greedy(http, rng, jobs[(number + 7 * turn) % len(jobs)], seen)
                await other(http, rng, seen)
                turn += 1

        async def watch() -> None:
            nonlocal least
            while True:
                least = min(least, (await asyncio.to_thread(process.blocks))[1])
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        watching.cancel()
    return least


@pytest.mark.slow
def test_clients_of_all_kinds_get_their_answers_and_no_memory_is_lost(server: Process, jobs: list[Job]) -> None:
    seen: Counter[str] = Counter()
    least = asyncio.run(load(server, jobs, 0, seen))
    before = server.resident()
    least = min(least, asyncio.run(load(server, jobs, SECONDS, seen)))
    assert server.resident() - before < MORE_MEMORY
    for _ in range(5):
        if least >= 4:  # who watches may have been late
            least = min(least, asyncio.run(load(server, jobs, 0, seen)))
    assert least < 4  # they did get in each other's way
    assert min(seen[kind] for kind in ("cached", "answered", "refused", "given up", "constrained")) > 0, seen
    eventually(server.is_idle)
    blocks, free = server.blocks()
    assert free == blocks == CONTEXT // BLOCK - 1
    assert server.post("/v1/completions", prompt="on", max_tokens=2)
    assert "internal" not in {line.get("outcome") for line in server.log()}
