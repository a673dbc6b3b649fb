"""/mcp: real MCP servers, over programs and HTTP, and all that they may do wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarlm.server.mcp import session
from polarlm.server.mcp.session import FAILED, READY, McpError, McpServer, Session
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually
from tests.server.mcp.faults import TOKEN, mcp_file, over_http
from tests.server.models.running import front, two_models
from tests.server.process import Process
from tests.server.test_batch import Moody, moody
from tests.tiny import load_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mcp") is None, reason="the extra mcp is not installed"),
]


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("mcp")
    with (
        over_http() as web,
        load_tiny(tiny_path, device="cpu", cache_type="f16", block_size=16) as engine,
        serving(engine, mcp_config=str(mcp_file(folder, web)), max_body=100_000, request_seconds=100) as running,
    ):
        yield running


def call(server: Serving, tool: str, name: str = "tools", **arguments: Any) -> httpx.Response:
    return server.post("/mcp/call", {"server": name, "tool": tool, "arguments": arguments})


def text(server: Serving, tool: str, name: str = "tools", **arguments: Any) -> str:
    answer = call(server, tool, name, **arguments)
    assert answer.status_code == 200, answer.text
    assert not answer.json()["is_error"], answer.text
    return answer.json()["text"]


def failure(server: Serving, tool: str, **arguments: Any) -> str:
    """The sentence of a call after which the session has ended."""
    answer = call(server, tool, **arguments)
    assert answer.status_code == 502
    return answer.json()["error"]["message"]


def listed(server: Serving) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in server.http.get("/mcp/servers").json()["servers"]}


@pytest.mark.parametrize("name", ["tools", "web"])
def test_tools_are_listed_and_called(server: Serving, name: str) -> None:
    before = listed(server)
    assert list(before) == ["tools", "web", "absent", "broken", "deaf"]
    answer = server.post("/mcp/connect", {"server": name}).json()
    assert (answer["state"], answer["trouble"]) == ("ready", None)
    add = answer["tools"][0]
    assert (add["name"], add["trouble"]) == ("add", None)
    assert (add["function"]["name"], add["function"]["description"]) == (f"{name}_add", "Adds two numbers.")
    assert add["function"]["parameters"]["required"] == ["a", "b"]
    assert text(server, "add", name, a=2, b=3) == "5"
    assert listed(server)[name] == answer


def test_pictures_are_named_and_errors_are_marked(server: Serving) -> None:
    assert text(server, "picture") == "Look:\n\n[image, image/png, 30 kB: only text is passed on]"
    assert call(server, "fail").json()["is_error"]
    assert call(server, "add", a="x").json()["is_error"]
    assert "more than a conversation" in call(server, "long", bytes=25_001).json()["text"]
    assert len(text(server, "long", bytes=25_000)) == 25_000
    assert text(server, "garbage") == "after garbage"


def test_a_program_gets_no_variable_but_its_own_and_the_usual_ones(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(server, "crash")
    monkeypatch.setenv("POLARLM_API_KEY", "a secret of the server's")
    usual = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LC_CTYPE"}
    assert set(text(server, "environment").split()) <= usual | {"TOKEN"}


@pytest.mark.parametrize(
    ("tool", "why"),
    [("crash", "out of luck"), ("flood", "more than can be read"), ("chatter", "messages without end")],
)
def test_a_session_that_ended_begins_again(server: Serving, tool: str, why: str) -> None:
    first = int(text(server, "pid"))
    assert why in failure(server, tool)
    assert listed(server)["tools"]["state"] == "failed"
    second = int(text(server, "pid"))
    assert first != second
    eventually(lambda: not alive(first))
    os.kill(second, 9)  # while nobody asks
    eventually(lambda: listed(server)["tools"]["state"] == "failed")
    assert text(server, "add", a=1, b=1) == "2"


@pytest.mark.parametrize(("name", "why"), [("absent", "There is no program"), ("broken", "It has ended")])
def test_a_server_that_cannot_be_started_says_why_without_secrets(server: Serving, name: str, why: str) -> None:
    answer = server.post("/mcp/connect", {"server": name}).json()
    assert (answer["state"], answer["tools"]) == ("failed", [])
    assert answer["trouble"].startswith(why) or "Connection closed" in answer["trouble"]
    assert TOKEN not in answer["trouble"]


def test_a_deaf_server_is_ended_and_keeps_nobody_waiting(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    assert text(server, "add", a=1, b=1) == "2"  # the other one is connected to
    monkeypatch.setattr(session, "_CONNECT_SECONDS", 4.0)
    body = {"server": "deaf"}
    with (
        httpx.Client(base_url=server.http.base_url, timeout=60) as other,
        other.stream("POST", "/mcp/connect", json=body) as waiting,
    ):
        assert text(server, "add", a=1, b=1) == "2"
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        waiting.read()
    assert "within 4 seconds" in waiting.json()["trouble"]


@pytest.mark.parametrize("name", ["tools", "web"])
def test_a_call_is_cancelled_when_its_client_is_gone(server: Serving, name: str, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    body = {"server": name, "tool": "hang", "arguments": {"begun": str(begun), "ended": str(ended)}}
    with server.send("/mcp/call", body):
        eventually(begun.exists)
        assert text(server, "add", name, a=1, b=1) == "2"
        assert not ended.exists()
    eventually(ended.exists)


def test_a_call_has_a_time(server: Serving, tmp_path: Path) -> None:
    # It is the server's own limit of a request, here 100 seconds, which a test need not wait for.
    config = server.driver.config
    try:
        begun, ended = tmp_path / "begun", tmp_path / "ended"
        for seconds in (1, 5, 50):  # it may begin late
            object.__setattr__(config, "request_seconds", seconds)
            said = failure(server, "hang", begun=str(begun), ended=str(ended))
            assert f"has not answered within {seconds} seconds" in said
            if begun.exists():
                break
        eventually(ended.exists)
    finally:
        object.__setattr__(config, "request_seconds", 100)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_server(tiny_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Not even one that does not end when it is asked to."""
    begun, deaf = tmp_path / "begun", tmp_path / "deaf"
    with (
        Process(tiny_path, tmp_path, "--mcp-config", str(mcp_file(tmp_path))) as process,
        httpx.Client(base_url=process.url, timeout=60) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        programs = [
            int(client.post("/mcp/call", json={"server": "tools", "tool": tool, "arguments": {}}).json()["text"])
            for tool in (("pid", "leave") if sys.platform == "linux" else ("pid",))
        ]
        hang = {"begun": str(begun), "ended": str(tmp_path / "ended")}
        call = pool.submit(client.post, "/mcp/call", json={"server": "tools", "tool": "hang", "arguments": hang})
        pool.submit(client.post, "/mcp/connect", json={"server": "deaf"})
        eventually(lambda: begun.exists() and deaf.exists() and deaf.read_text())
        process.signal(number)
        process.process.wait(60)
        if number == signal.SIGTERM:
            assert process.process.returncode == 0
            assert call.result().status_code == 502  # it ended in order
        for program in (*programs, int(deaf.read_text())):
            eventually(lambda program=program: not alive(program))
        assert TOKEN not in process.errors.read_text()


def test_a_server_of_several_models_has_them_too(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with front(two_models(tmp_path / "models"), mcp_config=str(mcp_file(tmp_path))) as running:
        told = running.http.post("/mcp/call", json={"server": "tools", "tool": "add", "arguments": {"a": 2, "b": 3}})
        assert told.json() == {"text": "5", "is_error": False}


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# -- servers that are not what they say, without a server of ours ----------------------------------------------

LIAR = str(Path(__file__).with_name("liar.py"))
SECRET = "token=sk-in-the-address"


@pytest.mark.anyio
async def test_tools_that_no_model_can_call_are_told_and_wrong_answers_are_errors() -> None:
    session = Session(McpServer("liar", sys.executable, (LIAR,)), 10_000)
    try:
        await session.connect()
        troubles = {tool.name: tool.trouble or "" for tool in session.tools}
        assert {name for name, trouble in troubles.items() if not trouble} == {
            *("good", "a b", "list", "structured", "unreadable", "half a character", "too deep")
        }
        assert "same name" in troubles["a_b"]
        assert "nested" in troubles["deep"]
        for tool in ("structured", "unreadable", "a b", "list", "deep", "half a character", "too deep"):
            assert (await session.call(tool, {}, 120))["is_error"], tool
        assert await session.call("good", {}, 120) == {"text": "well", "is_error": False}
        assert session.state == READY
    finally:
        await session.close()


def trouble(server: McpServer) -> str:
    """Why a session cannot be opened."""

    async def connect() -> str:
        session = Session(server, 10_000)
        with pytest.raises(McpError):
            await session.connect()
        assert session.state == FAILED
        await session.close()
        return session.trouble or ""

    return asyncio.run(connect())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("pages", "more than 20 pages"),
        ("schema", "not keep to the protocol"),
        ("abyss", "answer cannot be read (Invalid JSON: recursion"),
    ],
)
def test_a_list_of_tools_that_is_none_is_refused(kind: str, why: str) -> None:
    assert why in trouble(McpServer(kind, sys.executable, (LIAR, kind)))


@contextmanager
def web(status: int, pieces: int) -> Iterator[str]:
    """The address of a server that answers everything with so many pieces of a megabyte."""

    def answer(handler: Moody) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        for _ in range(pieces):
            handler.wfile.write(b"a" * (1 << 20))

    with moody(*[answer] * 9) as url:
        yield f"{url}/mcp?{SECRET}"


@pytest.mark.parametrize(
    ("status", "pieces", "why"), [(200, 200, "more than can be read"), (401, 0, "(status 401)"), (200, 1, "")]
)
def test_an_address_that_sends_something_else_says_so_without_secrets(status: int, pieces: int, why: str) -> None:
    with web(status, pieces) as url:
        said = trouble(McpServer("web", url=url, headers={"Authorization": f"Bearer {SECRET}"}))
    assert why in said
    assert SECRET not in said
    assert len(said) < 600


def test_an_address_where_nobody_is_says_so() -> None:
    said = trouble(McpServer("web", url=f"http://127.0.0.1:9/mcp?{SECRET}"))
    assert said == "The connection failed (ConnectError: All connection attempts failed)"
