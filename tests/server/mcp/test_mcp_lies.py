"""MCP servers that are not what they say: sessions with them, without a server of ours."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from polarlm.server.mcp.session import FAILED, READY, McpError, McpServer, Session

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mcp") is None, reason="the extra mcp is not installed"),
]

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

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            for _ in range(pieces):
                self.wfile.write(b"a" * (1 << 20))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/mcp?{SECRET}"
        server.shutdown()


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
