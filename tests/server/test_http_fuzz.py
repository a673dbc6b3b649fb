"""Whatever a request holds, it is answered or refused: never an error of the server's own."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from tests.server.http_server import Serving, serving

CHAT: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "system", "content": "on"}, {"role": "user", "content": "the rain"}],
    "temperature": 0,
    "top_p": 1,
    "n": 1,
    "stop": ["the"],
    "seed": 1,
    "logit_bias": {"5": 1},
    "max_tokens": 2,
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {**CHAT, "prompt": "the rain", "logprobs": 2, "top_logprobs": 0},
    "/v1/messages": {
        "model": "any",
        "system": [{"type": "text", "text": "on", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "the rain"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "ran"}]},
            {"role": "user", "content": "on"},
        ],
        "max_tokens": 2,
        "temperature": 0,
        "top_k": 5,
        "stop_sequences": ["the"],
        "stream": False,
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "none"},
        "metadata": {"user_id": "me"},
    },
    "/v1/responses": {
        "model": "any",
        "instructions": "on",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "the rain"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "he"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ran"}]},
            {"type": "message", "role": "user", "content": "on"},
        ],
        "max_output_tokens": 2,
        "temperature": 0,
        "top_logprobs": 1,
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "stream": False,
    },
    "/api/chat": {
        "model": "any",
        "messages": [
            {"role": "system", "content": "on"},
            {"role": "user", "content": "the rain", "images": []},
            {"role": "assistant", "content": "ran", "thinking": "", "tool_calls": []},
            {"role": "user", "content": "on"},
        ],
        "options": {"temperature": 0, "num_predict": 2, "stop": ["the"], "num_ctx": 4096, "mirostat": 0},
        "format": "",
        "think": False,
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 1,
        "stream": False,
    },
    "/api/generate": {
        "prompt": "the rain",
        "system": "on",
        "raw": False,
        "options": {"temperature": 0, "num_predict": 2},
        "context": [],
        "stream": False,
    },
    "/api/embed": {"model": "any", "input": ["the", "rain"], "truncate": True},
    "/api/show": {"model": "any"},
    "/tokenize": {"content": "the rain"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 16, 17, 0.5, -0.0, 1e308, 10**30, -(2**63), 2**64, float("nan"), float("inf")),
    *("", "a", "\0", "\ud800", "€" * 2000, "<|im_end|>", [], [[]], [None], ["a"] * 40, [0] * 400, [2**70], {}),
    *({"": None}, {"role": "user"}, {"type": "text"}, {"5": float("nan")}, {"x": {"y": [{}]}}, {"include_usage": 1}),
]
MESSAGES = 2000


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Serving]:
    with (
        Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=8) as engine,
        serving(engine, max_tokens=2, max_body=20_000) as running,
    ):
        yield running


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def changed(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        container, key = rng.choice([*places(body), (body, rng.choice(("suffix", "tools", "new", "top_k", "prompt")))])
        container[key] = copy.deepcopy(rng.choice(JUNK))
    return body


def broken(data: bytes, rng: random.Random) -> bytes:
    """Sometimes as it is, sometimes cut, and sometimes with other bytes in it."""
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at + 1 :]
    return data


def has_shape(path: str, error: Any) -> bool:
    """Whether an error has the shape of the API that the path belongs to."""
    if path.startswith("/v1/messages"):
        return set(error) == {"type", "error"} and set(error["error"]) == {"type", "message"}
    if path.startswith("/api/"):
        return set(error) == {"error"} and isinstance(error["error"], str)
    return set(error["error"]) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}


def test_no_body_breaks_the_server(server: Serving) -> None:
    rng = random.Random(0)
    seen: dict[int, int] = {}
    for number in range(MESSAGES):
        path = rng.choice(list(VALID))
        data = broken(json.dumps(changed(VALID[path], rng)).encode(), rng)
        response = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        where = f"message {number} to {path}: {data!r} → {response.text}"
        assert response.status_code in (200, 400, 413), where
        if response.status_code != 200:
            assert has_shape(path, response.json()), where
    assert seen[200] > 60  # some is harmless
    assert seen[400] > 300
    for path, body in VALID.items():
        assert server.post(path, body).status_code == 200


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_no_depth_breaks_the_server(server: Serving, opening: str) -> None:
    """In any field, whether it is read or ignored."""
    closing = "]" if opening == "[" else "}"
    for path, body in VALID.items():
        for name in [*body, "tools", "new", "response_format", "json_schema"]:
            for depth in (70, 400, 900, 5000):
                rest = json.dumps({key: value for key, value in body.items() if key != name})
                deep = opening * depth + "1" + closing * depth
                data = f"{{{json.dumps(name)}: {deep}{', ' if len(rest) > 2 else ''}{rest[1:]}"
                response = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
                assert response.status_code in (200, 400, 413), f"{path}, {name}, {depth}: {response.text[:200]}"
                assert response.status_code == 200 or has_shape(path, response.json())
