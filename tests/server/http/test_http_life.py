"""Streams that have nothing to send yet show life, so that no proxy between server and client hangs up."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from polarlm.engine import Engine
from polarlm.server.http import streams
from tests.pairs import in_turn
from tests.server.apis import APIS, events
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually

WORDS = "the rain " * 8
CHAT = {"messages": [{"role": "user", "content": WORDS}]}
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
BODIES = {api.path: api.body(WORDS, **SHORT) for api in APIS.values()}


@pytest.fixture
def server(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr(streams, "SILENT_SECONDS", 0.05)
    with serving(tiny) as running:
        yield running


def is_sign(frame: str) -> bool:
    if frame == ":":
        return True
    line = json.loads(frame) if frame.startswith("{") else {}
    return line.get("done") is False and "" in (line.get("response"), line.get("message", {}).get("content"))


@in_turn("path", BODIES)
def test_a_stream_shows_life_before_its_first_token(server: Serving, path: str) -> None:
    body = BODIES[path] | {"stream": True}
    separator = "\n" if path.startswith("/api/") else "\n\n"
    server.gate.close()
    with server.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_text()
        read = next(lines)
        while read.count(separator) < 3:
            read += next(lines)
        assert all(map(is_sign, read.split(separator)[:3]))
        server.gate.open()
        read += "".join(lines)
    frames = [frame for frame in read.split(separator) if frame]
    rest = [frame for frame in frames if not is_sign(frame)]
    calm = [frame for frame in server.post(path, body).text.split(separator) if frame and not is_sign(frame)]
    assert len(rest) == len(calm) > 1
    assert '"error":{' not in rest[-1]


def test_makers_clients_pass_over_the_signs(server: Serving) -> None:
    """And Ollama's: tests/server/models/test_http_models.py."""

    def opened_by_a_sign() -> None:
        eventually(lambda: server.busy)
        server.loop.call_soon_threadsafe(server.loop.call_later, 0.2, server.gate.open)

    whole = server.post("/v1/chat/completions", CHAT | SHORT).json()["choices"][0]["message"]["content"]
    server.gate.close()
    chat = server.openai.chat.completions.create(
        model="any",
        messages=CHAT["messages"],
        max_tokens=4,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    opened_by_a_sign()
    assert "".join(part.choices[0].delta.content or "" for part in chat) == whole
    server.gate.close()
    with (
        server.anthropic() as client,
        client.messages.stream(
            model="any", max_tokens=4, messages=CHAT["messages"], extra_body={"temperature": 0}
        ) as stream,
    ):
        opened_by_a_sign()
        assert stream.get_final_message().usage.output_tokens > 0


def test_a_stream_that_falls_silent_later_shows_life_too(server: Serving) -> None:
    server.gate.close()
    with server.http.stream("POST", "/v1/completions", json=BODIES["/v1/completions"] | {"stream": True}) as answer:
        frames = answer.iter_lines()
        while not next(frames).startswith("data: "):
            server.gate.let_another()
        assert ":" in frames  # after what the gate has let through
        server.gate.open()
        assert list(frames)[-2] == "data: [DONE]"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_errors_have_their_status_until_something_was_sent(
    server: Serving, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(streams, "SILENT_SECONDS", 3600)
        patch.setattr(server.engine._model, "chunks", _failing)
        body = BODIES[path] | {"stream": True}
        assert server.post(path, body).status_code == 500
        patch.setattr(streams, "SILENT_SECONDS", 0.05)
        server.gate.close()
        with server.http.stream("POST", path, json=body) as answer:
            server.gate.open()
            read = answer.read().decode()
    assert answer.status_code == 200
    last = [line for line in read.splitlines() if line][-1]
    assert "error" in json.loads(last.removeprefix("data: "))
    assert "secret" not in read


def _failing(*arguments: Any, **more: Any) -> Iterator[int]:
    raise RuntimeError("a secret of the engine's")
    yield 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_a_request_sets_the_silence(server: Serving, path: str) -> None:
    """`sse_ping_interval`, as llama-server has it."""
    body = BODIES[path] | {"stream": True, "cache_prompt": False}
    server.gate.close()
    server.loop.call_soon_threadsafe(server.loop.call_later, 0.3, server.gate.open)
    assert ":\n\n" not in server.post(path, body | {"sse_ping_interval": -1}).text
    for wrong in (-2, "x", 0.5):
        assert server.refused(path, body | {"sse_ping_interval": wrong})["param"] == "sse_ping_interval"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_a_stream_tells_how_far_its_prompt_is(server: Serving, path: str) -> None:
    """`return_progress`, as llama-server has it; with `echo`, the prompt comes once."""
    body = BODIES[path] | {"return_progress": True, "cache_prompt": False, "sse_ping_interval": -1, "stream": True}
    if path == "/v1/completions":
        body |= {"echo": True, "logprobs": 0}
    parts = events(server.post(path, body).text)
    told, _, again = (
        [event["prompt_progress"] for event in each if "prompt_progress" in event]
        for each in (parts, *(events(server.post(path, body | {"cache_prompt": True}).text) for _ in range(2)))
    )
    done = [one["processed"] for one in told]
    assert 0 < done[0] <= done[-1] == told[-1]["total"]
    assert done == sorted(done)
    assert all(one["cache"] == 0 <= one["time_ms"] for one in told)
    if path == "/v1/completions":
        assert json.dumps(parts).count(WORDS) == 1
    else:
        assert 0 < again[0]["cache"] < again[0]["total"]
    whole = server.post(path, body | {"stream": False})
    assert (whole.status_code, "prompt_progress" in whole.text) == (200, False)


def test_signs_of_life_never_come_between_other_pieces_or_after_the_last() -> None:
    """Hundreds of streams at once, a sign due at every millisecond, and clients that leave at any time."""
    wrong: list[str] = []

    async def one(rng: random.Random) -> None:
        sent: list[bool | None] = []  # whether each message is the last one of the body; None for the headers
        under_way, is_closed, gone = False, False, asyncio.Event()

        async def events() -> AsyncGenerator[streams.Event, None]:
            nonlocal is_closed
            try:
                for number in range(rng.randrange(20)):
                    await asyncio.sleep(rng.choice((0, 0.001, 0.002, 0.005)))
                    yield {"number": number}
            finally:
                is_closed = True

        async def send(message: Any) -> None:
            nonlocal under_way
            last = None if message["type"] == "http.response.start" else not message["more_body"]
            if under_way or True in sent or (last is None) == bool(sent):
                wrong.append(f"{message} after {sent}, {under_way}")
            sent.append(last)
            under_way = True
            try:
                await asyncio.sleep(rng.choice((0, 0.001, 0.003)))
            finally:
                under_way = False

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        leaves = rng.random() < 0.5
        if leaves:
            asyncio.get_running_loop().call_later(0.05 * rng.random(), gone.set)
        each = events()
        stream = streams.EventStream(each, streams.DATA, sign=lambda: streams.COMMENT)
        stream.silent_seconds = 0.001
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 60)
        if not is_closed or (not leaves and sent[-1] is not True):
            wrong.append(f"no end: {sent}, {is_closed}")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(str(context)))
        await asyncio.gather(*(one(random.Random(number)) for number in range(300)))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert wrong == []
