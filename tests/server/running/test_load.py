"""64 clients that mix dialects, schemas, tools, embeddings and cancels, and room for about eight: no error of the
server's, everybody gets an answer of their own, and nothing is left behind.

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
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.server.apis import APIS, events
from tests.server.lines import PATIENCE, eventually
from tests.server.process import SMALL_BLOCKS, Process
from tests.tiny import VOCABULARY, make_model

CLIENTS = 64
SECONDS = float(os.environ.get("POLARLM_LOAD_SECONDS", "4"))  # for which clients go on asking, but for a first round
TOKENS = 24
BLOCK, CONTEXT = 8, 176  # room for 21 blocks behind first ones; a sequence of 40 tokens takes 4, shared ones included
LETTERS = "abcdefghijklmnop"
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


@pytest.fixture(scope="module", params=["llama_gqa_linear", "qwen3_next_shared_keys"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with attention alone, and one with recurrent layers."""
    made = make_model(tmp_path_factory.mktemp("model"), request.param)
    return Path(os.environ.get("POLARLM_LOAD_WEIGHTS", made))


@pytest.fixture
def server(weights: Path, tmp_path: Path) -> Iterator[Process]:
    flags = ("--cache-type", "f16", "--state-type", "f32", "--parallel", "16", "--threads", "1")
    flags += ("--ctx-size", str(CONTEXT), "--max-queue", str(4 * CLIENTS))
    empty = {CACHE_VARIABLE: str(tmp_path / "cache")}  # so that LLVM, which takes memory, is loaded at the start
    with Process(weights, tmp_path, *flags, prelude=SMALL_BLOCKS.format(kept=4), **empty) as process:
        yield process


async def known(http: httpx.AsyncClient, rng: random.Random, number: int, seen: Counter[str]) -> None:
    """A request whose answer is known, a letter again and again. The beginnings of most prompts are shared."""
    api, stream, letter = APIS["completions"], rng.random() < 0.5, LETTERS[number % len(LETTERS)]
    begin = [5 + number % 2] * 19 if number % 4 else []
    prompt = [*begin, *(rng.randrange(5, VOCABULARY) for _ in range(rng.randrange(3, 20)))]
    more: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logit_bias": {letter: 1000}}
    answer = await http.post(api.path, json=api.body(prompt, stream=stream, max_tokens=TOKENS, **more))
    assert answer.status_code == 200, answer.text
    reply = api.streamed(events(answer.text)) if stream else api.whole(answer.json())
    assert (reply.text, reply.reason) == (letter * TOKENS, "length")
    assert (reply.prompt_tokens, reply.completion_tokens) == (len(prompt), TOKENS)
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


async def load(process: Process, seconds: float, seen: Counter[str]) -> int:
    """All clients ask, each one request behind the other until the time is over; the least blocks that were free."""
    until = time.monotonic() + seconds
    limits, least = httpx.Limits(max_connections=CLIENTS), 1 << 30
    async with httpx.AsyncClient(base_url=process.url, timeout=PATIENCE, limits=limits) as http:

        async def client(number: int) -> None:
            rng, turn = random.Random(number), 0
            while turn < 2 or time.monotonic() < until:
                await known(http, rng, number + 7 * turn, seen)
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
def test_clients_of_all_kinds_get_their_answers_and_no_memory_is_lost(server: Process) -> None:
    seen: Counter[str] = Counter()
    least = asyncio.run(load(server, 0, seen))
    before = server.resident()
    least = min(least, asyncio.run(load(server, SECONDS, seen)))
    assert server.resident() - before < MORE_MEMORY
    for _ in range(5):
        if least >= 4:  # who watches may have been late
            least = min(least, asyncio.run(load(server, 0, seen)))
    assert least < 4  # they did get in each other's way
    assert min(seen[kind] for kind in ("cached", "answered", "refused", "given up", "constrained")) > 0, seen
    eventually(server.is_idle)
    blocks, free = server.blocks()
    assert free == blocks == CONTEXT // BLOCK - 1
    assert server.post("/v1/completions", prompt="on", max_tokens=2)
    assert "internal" not in {line.get("outcome") for line in server.log()}
