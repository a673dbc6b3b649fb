"""Whatever a request holds, it is answered or refused: never an error of the server's own.

POLARLM_FUZZ_MESSAGES=100000 sends more of them, POLARLM_FUZZ_SEED=1 others.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from polarlm.engine import Engine
from polarlm.server.http.app import create_app
from polarlm.server.reading import constraints
from tests.server.apis import APIS
from tests.server.http_server import Serving, serving
from tests.server.reading.test_histories import ANTHROPIC, OLLAMA, RESPONSES
from tests.tiny import assert_idle

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
    "return_progress": False,
    "sse_ping_interval": 5,
    "cache_salt": "a",
    "priority": 3,
    "lora": [],
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {**CHAT, "prompt": "the rain", "logprobs": 2, "top_logprobs": 0, "echo": True, "best_of": 1},
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
    "/completion": {
        "prompt": [5, "the rain", 7],
        "n_predict": 2,
        "n_probs": 2,
        "n_cmpl": 2,
        "return_tokens": True,
        "timings_per_token": True,
        "cache_prompt": False,
        "stop": ["the"],
        "logit_bias": [[5, 1], ["the", False]],
        "stream": False,
    },
    "/chat/completions/input_tokens": CHAT,
    "/apply-template": {"messages": [*CHAT["messages"], {"role": "assistant", "content": "on"}]},
    "/v1/embeddings": {"input": ["the rain", [5, 6]], "encoding_format": "base64", "pooling": "last", "model": "any"},
    "/embedding": {"content": "the rain", "embd_normalize": 2},
    "/tokenize": {"content": "the rain"},
    "/detokenize": {"tokens": [5, 6, 7]},
}
TALK = "0123456789abcdef"
# Paths that may answer otherwise, although nothing in the body is wrong: by their status.
KEPT: dict[str, dict[str, Any]] = {
    f"/conversations/{TALK}": {"base": 0, "head": {"title": "a"}, "messages": {TALK: {"text": "the rain"}}},
    "/sessions/save": {"name": "talk", "prompt": "the rain", "cache_salt": "a", "parse_special": True, "model": "any"},
    "/sessions/load": {"name": "talk", "cache_salt": "a"},
    "/v1/rerank": {"query": "the rain", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
}
OUTCOMES = {404, 409, 422}  # no such session, a change that comes too late, nothing of the prompt is there
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 16, 17, 0.5, -0.0, 1e308, 10**30, 10**400, -(2**63), 2**64),
    *(float("nan"), float("inf")),
    *("", "a", "\0", "\ud800", "€" * 2000, "<|im_end|>", [], [[]], [None], ["a"] * 40, [0] * 400, [2**70], {}),
    *({"": None}, {"role": "user"}, {"type": "text"}, {"5": float("nan")}, {"x": {"y": [{}]}}, {"include_usage": 1}),
]
MESSAGES = int(os.environ.get("POLARLM_FUZZ_MESSAGES", "2000"))
SEED = int(os.environ.get("POLARLM_FUZZ_SEED", "0"))
EVERYTHING: dict[str, Any] = {
    name: value for body in (*VALID.values(), *KEPT.values()) for name, value in body.items()
}  # for other paths
# Fields that constrain answers, in any of the dialects, and what could stand in them.
CONSTRAINING = (*constraints._FIELDS, "text", "output_config", "format", "tools", "tool_choice")
WORDS: dict[str, list[Any]] = {
    "type": ["object", "array", "string", "integer", "number", "null", ["integer", "null"], "date", 3],
    "properties": [{}, {"a": {"type": "integer"}}, {"": True}, []],
    "required": [["a"], "a", [1]],
    "items": [{"type": "integer"}, False, []],
    "minimum": [0, 7, -1e300, "1"],
    "maximum": [3, 1e300, None],
    "minLength": [0, 5, 10**9, -1],
    "maxLength": [2, 10**12],
    "minItems": [0, 3, 10**9],
    "pattern": ["^[0-9]+$", "(", "(a+)+$", "\\p{L}{3}"],
    "enum": [[1, "a", None], [], "a"],
    "const": [7, {"a": [1]}],
    "anyOf": [[{"type": "integer"}, {"$ref": "#"}], [], [3]],
    "allOf": [[{"minimum": 3}, {"maximum": 1}], [{"$ref": "#/$defs/a"}]],
    "not": [{}, {"type": "integer"}],
    "$ref": ["#", "#/nowhere", "http://127.0.0.1:9/a", 3],
    "$defs": [{"a": {"$ref": "#/$defs/a"}}, {"a": {"type": "integer"}}],
    "format": ["date", "uuid", "nonsense", 3],
    "additionalProperties": [True, False, {"type": "integer"}],
    "multipleOf": [7, 0.01, 0, -1],
    "x-guidance": [{"whitespace_flexible": False}, {"lenient": 3}],
}
GRAMMARS = [
    *('root ::= "a" | [0-9]+', "root ::= root", "root ::=", 'start: "a" b\nb: /[0-9]+/', "start: %json {}"),
    *("start: a", "("),
    *("%llguidance {}\nstart: /a/", "start: <|im_end|>", "root ::= <think>", "start: @a", "[0-9]{1,9}", "a{99999999}"),
]
TOOLS = [
    [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    [{"type": "function", "function": {"name": "", "parameters": []}}, {"type": "function"}],
    [{"name": "look", "input_schema": {"type": "object"}}],
    [{"type": "function", "name": "look", "parameters": {}}],
]


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("sessions", "conversations")}
    with Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=16) as engine:
        with serving(engine, max_tokens=2, max_body=20_000, **folders) as running:
            yield running
            assert running.driver.snapshot().active == 0
        assert_idle(engine)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def schema(rng: random.Random) -> dict[str, Any]:
    """A schema of a few words, some of them wrong."""
    return {word: copy.deepcopy(rng.choice(WORDS[word])) for word in rng.sample(list(WORDS), rng.choice((1, 1, 2, 3)))}


def constraint(rng: random.Random) -> Any:
    """What may stand in a field that constrains an answer, in any dialect."""
    wanted = schema(rng)
    wrapped = {"type": "json_schema", "name": "a", "schema": wanted, "json_schema": {"name": "a", "schema": wanted}}
    return rng.choice(
        (
            *(wanted, json.dumps(wanted), wrapped, {"format": wrapped}, {"type": "json_object"}, {"json": wanted}),
            *(rng.choice(GRAMMARS), rng.choice(GRAMMARS), {"regex": rng.choice(GRAMMARS)}, ["a", "12"]),
            *(copy.deepcopy(rng.choice(TOOLS)), "required", "auto", {"type": "function", "function": {"name": "look"}}),
        )
    )


def changed(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = json.loads(json.dumps(body))
    if rng.random() < 0.3:
        body[rng.choice(CONSTRAINING)] = constraint(rng)
    if rng.random() < 0.2 and "stream" in body:
        body["stream"] = True
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        container, key = rng.choice(
            [
                *places(body),
                (body, rng.choice(("suffix", "echo", "tools", "new", "top_k", "prompt", "messages", "input"))),
            ]
        )
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


def status_of(http: httpx.Client, path: str, data: bytes, outcomes: set[int]) -> int:
    """The status of the answer to a body, one of these; an error has the shape of its API, and is not the server's."""
    response = http.post(path, content=data, headers={"Content-Type": "application/json"})
    where = f"{path}: {data!r} → {response.status_code} {response.text[:500]}"
    assert response.status_code in outcomes, where
    assert not re.search(r'"(internal|api_error|server_error)"', response.text), where  # in a stream
    assert response.status_code == 200 or has_shape(path, response.json()), where
    return response.status_code


@pytest.mark.slow
def test_no_body_breaks_the_server(server: Serving) -> None:
    rng = random.Random(SEED)
    app = create_app(server.driver, server.driver.config)
    posts = {route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    posts -= {"/documents/text", "/conversations/{id}"}  # a process for each; it is in `KEPT` by its name
    paths = sorted(path for path in posts if not path.startswith("/mcp")) + list(VALID) + list(KEPT)
    seen = Counter[int]()
    for _ in range(MESSAGES):
        path = rng.choice(paths)
        body = KEPT.get(path) or VALID.get(path) or VALID.get(f"/v1{path}", EVERYTHING)
        data = broken(json.dumps(changed(body, rng)).encode(), rng)
        # 501: a path that is refused by name; 403: adapters, whose folder the server has not been given
        outcomes = {200, 400, 403, 413, 501} | (OUTCOMES if path in KEPT else set())
        seen[status_of(server.http, path, data, outcomes)] += 1
    assert seen[200] > 60  # some is harmless
    assert seen[400] > 300
    for path, body in VALID.items():
        assert server.post(path, body).status_code == 200
    json.loads(server.http.get("/conversations").text, parse_constant=pytest.fail)  # as a page reads it


_TOOL = {"name": "time", "description": "a", "parameters": {"type": "object", "properties": {"a": {}}}}
HISTORIES: dict[str, list[Any]] = {  # an answer that calls a tool, and the tool's result
    name: [*pieces["call"]("rain", "a"), *pieces["result"]("rain", "a")]
    for name, pieces in (("messages", ANTHROPIC), ("responses", RESPONSES), ("ollama", OLLAMA))
}


@pytest.mark.slow  # hundreds of requests
@pytest.mark.parametrize("name", HISTORIES)
def test_no_body_with_tools_breaks_the_server(hermes: Serving, name: str) -> None:
    api = APIS[name]
    body = api.body([{"role": "user", "content": "How is it?"}, *HISTORIES[name]], max_tokens=2, tools=[_TOOL])
    assert hermes.post(api.path, body).status_code == 200
    rng, seen = random.Random(name), Counter[int]()
    for _ in range(250):
        seen[status_of(hermes.http, api.path, json.dumps(changed(body, rng)).encode(), {200, 400})] += 1
    assert seen[200] > 10
    assert seen[400] > 50


@pytest.mark.slow
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_no_depth_breaks_the_server(server: Serving, opening: str) -> None:
    """In any field, whether it is read or ignored."""
    closing = "]" if opening == "[" else "}"
    for path, body in (VALID | KEPT).items():
        for name in [*body, "tools", "new", "response_format", "json_schema"]:
            for depth in (70, 400, 900, 5000):
                rest = json.dumps({key: value for key, value in body.items() if key != name})
                deep = opening * depth + "1" + closing * depth
                data = f"{{{json.dumps(name)}: {deep}{', ' if len(rest) > 2 else ''}{rest[1:]}"
                status_of(
                    server.http, path, data.encode(), {200, 400, 413} | ({501, *OUTCOMES} if path in KEPT else set())
                )
