"""Clients that come while a model loads: probes are told so, and others wait and are served; what is said of those that
cannot be accepted."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from polarlm.server.config import ServerConfig
from polarlm.server.http.uvicorn_server import Web
from polarlm.server.running.listening import EarlyClients, quiet_accept_errors, tcp_socket
from tests.server.lines import eventually, until_closed


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with tcp_socket("127.0.0.1", 0) as listening:
        yield listening


def ask(bound: socket.socket, start: bytes) -> socket.socket:
    client = socket.create_connection(bound.getsockname(), timeout=60)
    client.sendall(start + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return client


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    answer: Response = PlainTextResponse(f"{request.url.path} of {request.client.port if request.client else None}")
    await answer(scope, receive, send)


@pytest.mark.parametrize("start", [b"GET /ping", b"HEAD /health", b"GET /v1/health?a=1"])
def test_while_a_model_loads_probes_are_told_and_others_wait(bound: socket.socket, start: bytes) -> None:
    with EarlyClients(bound) as early:
        other = ask(bound, b"POST /v1/chat/completions")
        answer = until_closed(ask(bound, start))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in head
        assert body == (b"" if start.startswith(b"HEAD") else b'{"status": "loading"}')
        (kept,) = early.hand_over()
    assert kept.getpeername() == other.getsockname()
    assert kept.recv(100).startswith(b"POST /v1/chat/completions HTTP/1.1"), "what was sent is there to be read"
    kept.close()
    other.close()


def test_those_that_wait_are_served_when_it_has_loaded(bound: socket.socket) -> None:
    async def serve(early: EarlyClients) -> list[bytes]:
        web, accepted = Web(app, ServerConfig(), bound), early.hand_over()
        await web.start()
        await web.adopt(accepted)
        try:
            loop = asyncio.get_running_loop()
            clients = (first, silent, ask(bound, b"GET /c"))
            return [await loop.run_in_executor(None, until_closed, client) for client in clients]
        finally:
            await web.close()

    with EarlyClients(bound) as early:
        first, silent = ask(bound, b"GET /a"), socket.create_connection(bound.getsockname(), timeout=60)
        eventually(lambda: len(early._connections) == 2)
        silent.sendall(b"GET /b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = asyncio.run(serve(early))
    for answer, path in zip(answers, (b"/a", b"/b", b"/c"), strict=True):
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert path + b" of " in answer


def test_who_hangs_up_is_forgotten_and_the_rest_is_closed_at_the_end(bound: socket.socket) -> None:
    with EarlyClients(bound) as early:
        stays = ask(bound, b"GET /")
        socket.create_connection(bound.getsockname()).close()
        answer = until_closed(ask(bound, b"GET /ping"))  # those before it have been looked at
        assert answer.startswith(b"HTTP/1.1 503 ")
        eventually(lambda: len(early._connections) == 1)
    with stays, pytest.raises(ConnectionResetError):  # what it has sent was never read
        stays.recv(1)


OUT_OF_FILES = {
    "message": "socket.accept() out of system resource",
    "exception": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
}
NOBODY_LISTENS = {
    "message": "Exception in callback BaseSelectorEventLoop._start_serving(<socket>)",
    "exception": ValueError("Invalid file descriptor: -1"),
}
OTHER = {"message": "Exception in callback something()", "exception": ValueError("other")}


@pytest.mark.parametrize(("context", "lines", "others"), [(OUT_OF_FILES, 1, 0), (NOBODY_LISTENS, 0, 0), (OTHER, 0, 3)])
def test_accept_errors_are_one_line_and_others_are_unchanged(
    context: dict[str, Any], lines: int, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three in the same second."""
    caplog.set_level(logging.WARNING)
    loop, handle = Mock(), quiet_accept_errors()
    for _ in range(3):
        handle(loop, context)
    assert len(caplog.records) == lines
    assert all(record.exc_info is None for record in caplog.records)
    assert loop.default_exception_handler.call_count == others
