"""64 clients that mix dialects, schemas, tools, embeddings and cancels: no error of the server's, nothing left behind.

POLARLM_LOAD_SECONDS=60 has them go on for a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarlm.engine import Engine
from tests.server.apis import API, APIS, events
from tests.server.http_server import Serving, serving
from tests.server.lines import PATIENCE, eventually
from tests.tiny import assert_idle, make_model

CLIENTS = 64
SECONDS = float(os.environ.get("POLARLM_LOAD_SECONDS", "4"))
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


def messages(rng: random.Random) -> list[dict[str, Any]]:
    """Of a few conversations, so that beginnings are found in the cache."""
    words = ["the rain", "then he", "an onion", "in the end"]
    turns = rng.randrange(3)
    said = [{"role": ("user", "assistant")[i % 2], "content": words[(turns + i) % 4]} for i in range(2 * turns)]
    return [*said, {"role": "user", "content": rng.choice(words)}]


def request(rng: random.Random) -> tuple[API | None, str, dict[str, Any], str]:
    """An API, if it generates, a path, a body, and the pattern of the answer's text."""
    said, stream = messages(rng), rng.random() < 0.5
    if rng.random() < 0.1:
        path, name = rng.choice((("/v1/embeddings", "input"), ("/tokenize", "content")))
        return None, path, {name: said[0]["content"]}, ""
    name = rng.choice(list(APIS))
    api = APIS[name]
    more, pattern = rng.choice(RAW if name == "completions" else ASKED)
    return api, api.path, api.body(said[-1]["content"] if api.is_raw else said, stream=stream, **more), pattern


async def ask(http: httpx.AsyncClient, rng: random.Random, seen: Counter[str]) -> None:
    """One request, which is sometimes given up before its end."""
    api, path, body, pattern = request(rng)
    gives_up = rng.random() < 0.2
    where = f"{path} {json.dumps(body)}"
    try:
        asked = http.post(path, json=body)
        answer = await asyncio.wait_for(asked, rng.random() * 0.3 if gives_up else PATIENCE)
        text = answer.text
    except asyncio.TimeoutError:
        assert gives_up, where
        seen["given up"] += 1
        return
    assert answer.status_code in (200, 400), f"{where} → {answer.status_code} {text}"
    # A streamed response whose prompt is too long has the status 200 and is one that failed.
    refused = answer.status_code == 400 or '"context_length_exceeded"' in text
    seen["refused" if refused else "answered"] += 1
    if refused:
        assert not pattern, f"{where} → {text}"
        return
    assert '"internal"' not in text, f"{where} → {text}"
    if api is not None:
        reply = api.streamed(events(text)) if body["stream"] else api.whole(json.loads(text))
        seen["constrained"] += bool(pattern)
        assert not pattern or re.fullmatch(pattern, reply.text), f"{where} → {text}"


async def soak(port: int, seconds: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, limits=limits) as http:

        async def client(number: int) -> None:
            rng = random.Random(number)
            turn = 0
            while turn < 2 or time.monotonic() < until:
                await ask(http, rng, seen)
                turn += 1

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return seen


def left(server: Serving) -> bool:
    return bool(server.driver.snapshot().active) or server.busy


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa_linear", "qwen3_next_shared_keys"], ids=["attention", "recurrent layers"])
def test_clients_of_all_kinds_at_once(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, name)
    plain = {"cache_type": "f16", "calibration": False, "block_size": 8, "parallel": 8, "kept_sequences": 4}
    with Engine.load(path, device="cpu", threads=1, **plain) as engine:
        with serving(engine, max_queue=4 * CLIENTS) as server:
            seen = asyncio.run(soak(server.port, SECONDS / 2))
            eventually(lambda: not left(server))
            assert min(seen["answered"], seen["refused"], seen["given up"], seen["constrained"]) > 0, seen
            assert server.post("/v1/completions", {"prompt": "on", "max_tokens": 2}).status_code == 200
        assert_idle(engine)
