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
from tests.server.http_server import Serving, serving
from tests.server.lines import PATIENCE, eventually
from tests.tiny import assert_idle, make_model

CLIENTS = 64
SECONDS = float(os.environ.get("POLARLM_LOAD_SECONDS", "4"))
WORD = "[a-f]{3,9}"
NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def messages(rng: random.Random) -> list[dict[str, Any]]:
    """Of a few conversations, so that beginnings are found in the cache."""
    words = ["the rain", "then he", "an onion", "in the end"]
    turns = rng.randrange(3)
    said = [{"role": ("user", "assistant")[i % 2], "content": words[(turns + i) % 4]} for i in range(2 * turns)]
    return [*said, {"role": "user", "content": rng.choice(words)}]


def schema(given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}


def request(rng: random.Random) -> tuple[str, dict[str, Any], str]:
    """A path, a body, and the pattern that the whole text of the answer matches; "" for none."""
    tokens, stream, prompt = rng.choice((1, 12, 30)), rng.random() < 0.5, messages(rng)
    chat: dict[str, Any] = {
        "messages": prompt,
        "max_tokens": tokens,
        "stream": stream,
        "temperature": rng.choice((0, 1)),
    }
    plain = {**chat, "prompt": prompt[-1]["content"]}
    del plain["messages"]
    words, numbers = {"guided_regex": WORD, "max_tokens": 30}, {"max_tokens": 30}
    digits = "[1-9][0-9]"
    output = {"format": {"type": "json_schema", "name": "a", "schema": NUMBER}}
    return rng.choice(
        [
            ("/v1/chat/completions", chat, ""),
            ("/v1/chat/completions", {**chat, **words, "n": 2}, WORD),
            ("/v1/chat/completions", {**chat, **numbers, "response_format": schema(NUMBER)}, digits),
            ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2, **words}, WORD),
            ("/v1/chat/completions", {**chat, "tools": [{"type": "function", "function": TOOL}]}, ""),
            ("/v1/chat/completions", {**chat, "json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, ""),
            ("/v1/completions", plain, ""),
            ("/v1/completions", {**plain, **words}, WORD),
            ("/v1/completions", {**plain, "grammar": 'root ::= "the " [a-f]+ " end" | "none"', **numbers}, ""),
            ("/v1/messages", {**chat, "model": "any"}, ""),
            ("/v1/messages", {**chat, "model": "any", **numbers, "output_config": output}, digits),
            ("/v1/messages", {**chat, "model": "any", "tools": [{"name": "look", "input_schema": {}}]}, ""),
            ("/v1/responses", {"input": prompt, "max_output_tokens": max(tokens, 1), "stream": stream}, ""),
            ("/v1/responses", {"input": prompt, "max_output_tokens": 30, "stream": stream, "text": output}, digits),
            ("/v1/embeddings", {"input": [prompt[0]["content"], "on"]}, ""),
            ("/tokenize", {"content": prompt[0]["content"]}, ""),
            ("/api/chat", {"messages": prompt, "stream": stream, "options": {"num_predict": tokens}}, ""),
            ("/api/generate", {"prompt": "the rain", "stream": stream, "format": NUMBER}, ""),
            ("/completion", {"prompt": "the rain", "n_predict": tokens, "stream": stream}, ""),
        ]
    )


def texts(path: str, body: Any) -> list[str]:
    """The texts of a whole answer in one of the dialects."""
    if "choices" in body:
        return [c["text"] if "text" in c else c["message"]["content"] or "" for c in body["choices"]]
    if path == "/v1/messages":
        return ["".join(block.get("text", "") for block in body["content"])]
    return ["".join(part["text"] for item in body["output"] for part in item.get("content", []))]


async def ask(http: httpx.AsyncClient, rng: random.Random, seen: Counter[str]) -> None:
    """One request, which is sometimes given up before its end."""
    path, body, pattern = request(rng)
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
    known = answer.status_code != 404  # a dialect that this server does not speak
    assert answer.status_code in (200, 400) or not known, f"{where} → {answer.status_code} {text}"
    seen[f"{answer.status_code}" if known else "unknown"] += 1
    if answer.status_code == 400:
        assert not pattern, f"{where} → {text}"
        return
    assert '"internal"' not in text, f"{where} → {text}"
    if pattern and not body["stream"]:
        seen["constrained"] += 1
        assert all(re.fullmatch(pattern, one) for one in texts(path, json.loads(text))), f"{where} → {text}"


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
            assert min(seen["200"], seen["400"], seen["given up"], seen["constrained"]) > 0, seen
            assert server.post("/v1/completions", {"prompt": "on", "max_tokens": 2}).status_code == 200
        assert_idle(engine)
