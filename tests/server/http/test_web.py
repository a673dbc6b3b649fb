"""HTTP connections as such: how many there may be, how long they may say nothing, and whether anybody is there."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from polarlm.server.config import ServerConfig
from polarlm.server.http import uvicorn_server
from polarlm.server.http.guard import Guard
from polarlm.server.http.uvicorn_server import Web, WebConnection
from polarlm.server.running.listening import tcp_socket
from tests.pairs import in_turn
from tests.server.http_server import join
from tests.server.lines import PATIENCE, eventually, until_closed

MOST = 3


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def slow_app(_scope: Any, receive: Any, send: Any) -> None:
    """Answers once its client has been told that something is wrong, or has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    await app(_scope, receive, send)


class Serving:
    """`app` at a free port, in an event loop of its own thread."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="web", daemon=True)
        self.thread.start()
        self.bound = tcp_socket("127.0.0.1", 0)
        self.address = self.bound.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self.web = self.call(self._make())
        self.call(self.web.start())

    async def _make(self) -> Web:
        return Web(self.app, ServerConfig(max_connections=MOST), self.bound)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    @property
    def connections(self) -> set[Any]:
        return self.web.server_state.connections

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *error: object) -> None:
        self.call(self.web.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        join(self.thread, self.loop)
        self.loop.close()


@pytest.fixture
def server() -> Iterator[Serving]:
    with Serving(app) as serving:
        yield serving


@pytest.fixture
def slow_server() -> Iterator[Serving]:
    with Serving(slow_app) as serving:
        yield serving


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What uvicorn logs, whatever servers of other tests have made of its loggers."""
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    caplog.set_level(logging.INFO, "uvicorn.error")
    return caplog


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def until_ok(client: socket.socket) -> None:
    received = b""
    while not received.endswith(b"ok"):
        data = client.recv(4096)
        assert data, "the server has hung up"
        received += data


def error_in(received: bytes) -> dict[str, Any]:
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.count(b"HTTP/1.1 ") == 1
    assert b"content-type: application/json" in head.lower()
    return json.loads(body)["error"]


def test_too_many_connections_are_an_error_of_the_apis_shape(server: Serving) -> None:
    """And hung up on, however many there are and whether they ask or not; those before them keep their place."""
    with ExitStack() as ends:
        clients = [ends.enter_context(httpx.Client(base_url=server.url)) for _ in range(MOST)]
        assert [client.get("/").status_code for client in clients] == [200] * MOST
        answer = httpx.get(server.url)
        assert answer.status_code == 503
        assert (answer.headers["content-type"], answer.headers["connection"]) == ("application/json", "close")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"] == {
            "message": "The server has too many connections: try again a little later",
            "type": "server_error",
            "param": None,
            "code": "busy",
        }
        silent = [ends.enter_context(server.connect()) for _ in range(100)]
        assert [error_in(until_closed(client))["code"] for client in silent] == ["busy"] * len(silent)
        assert [client.get("/").status_code for client in clients] == [200] * MOST
    eventually(lambda: not server.connections)
    assert httpx.get(server.url).status_code == 200


def test_a_dead_peer_is_detected(server: Serving) -> None:
    """The system asks for a sign of life, and gives up on what is not acknowledged."""
    with server.connect():
        eventually(lambda: server.connections)
        (connection,) = server.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert 0 < accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000


@pytest.mark.parametrize(
    ("before", "begun"), [(0, b""), (0, b"GET / HTT"), (0, b"GET / HTTP/1.1\r\nHost: a\r\n"), (2, b"G")]
)
def test_a_request_has_to_begin_in_time(
    server: Serving, monkeypatch: pytest.MonkeyPatch, before: int, begun: bytes
) -> None:
    """The first one, and one behind others, as soon as there is a byte of it."""
    if not before:  # a connection's time begins with it
        monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.1)
    with server.connect() as client:
        for _ in range(before):
            client.sendall(GET)
            until_ok(client)
        monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.1)
        with suppress(ConnectionError):  # the time may be over
            client.sendall(begun)
        assert until_closed(client) == b""


def test_between_requests_a_connection_stays_longer_than_clients_keep_it(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        assert client.get("/").status_code == 200
        monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.05)
        assert client.get("/").status_code == 200
        (before,) = server.connections
        threading.Event().wait(0.3)
        assert client.get("/").status_code == 200
        assert server.connections == {before}
    assert httpx.Limits().keepalive_expiry is not None
    assert 2 * httpx.Limits().keepalive_expiry < uvicorn_server._IDLE_SECONDS


def test_a_refused_client_that_resets_the_connection_causes_no_traceback(
    server: Serving, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that resets the connection as soon as it has its answer, before the server goes on."""
    send, gone = WebConnection._send, threading.Event()

    def send_and_wait(self: WebConnection, error: Any) -> None:
        send(self, error)
        assert gone.wait(PATIENCE)

    monkeypatch.setattr(WebConnection, "_send", send_and_wait)
    with ExitStack() as ends:
        for _ in range(MOST):
            ends.enter_context(server.connect())
        eventually(lambda: len(server.connections) == MOST)
        with server.connect() as client:
            assert client.recv(4096).startswith(b"HTTP/1.1 503")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.set()
        eventually(lambda: len(server.connections) == MOST)
        assert error_in(until_closed(ends.enter_context(server.connect())))["code"] == "busy"
    assert_no_traceback(log)


@pytest.mark.parametrize("body", [b"Content-Length: 100000", b"Transfer-Encoding: chunked"])
def test_an_answered_request_must_send_the_rest_of_its_body_in_time(
    server: Serving, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    """However its bytes come: else anybody could hold all connections for ever."""
    with server.connect() as client:
        client.sendall(GET)
        until_ok(client)
        monkeypatch.setattr(uvicorn_server, "HEAD_SECONDS", 0.3)  # no time begins before the next bytes come
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + body + b"\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        deadline = time.monotonic() + PATIENCE
        client.settimeout(0.02)
        with suppress(ConnectionError):
            while True:
                assert time.monotonic() < deadline
                client.sendall(b"1\r\nx\r\n" if b"chunked" in body else b"x")
                with suppress(TimeoutError):
                    if not client.recv(1):
                        break


def test_a_body_that_comes_after_its_answer_leaves_the_connection_as_it_was(server: Serving) -> None:
    with server.connect() as client:
        for _ in range(2):
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n")
            until_ok(client)
            client.sendall(b"abc")


def test_data_that_is_not_http_gets_an_error_of_the_apis_shape_and_one_line_in_the_log(
    server: Serving, log: pytest.LogCaptureFixture
) -> None:
    with server.connect() as client:
        name = "{}:{}".format(*client.getsockname())
        client.sendall(b"no such thing\r\n\r\n")
        assert error_in(until_closed(client)) == {
            "message": "This is no request that HTTP/1.1 allows",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_http",
        }
    assert [name in record.getMessage() for record in log.records if record.levelno >= logging.WARNING] == [True]


CHUNKED = b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"


def assert_no_traceback(log: pytest.LogCaptureFixture) -> None:
    assert [record.getMessage() for record in log.records if record.exc_info] == []
    assert len([record for record in log.records if record.levelno >= logging.WARNING]) <= 1


def test_a_broken_body_after_its_answer_causes_no_traceback(server: Serving, log: pytest.LogCaptureFixture) -> None:
    with server.connect() as client:
        client.sendall(CHUNKED)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        client.sendall(b"zz\r\n")
        until_closed(client)
    assert httpx.get(server.url).status_code == 200
    assert_no_traceback(log)


@pytest.mark.parametrize(("request_", "more"), [(CHUNKED, b"zz\r\n"), (LAST, b"more")])
def test_bytes_that_break_a_request_under_way_end_it(
    slow_server: Serving, log: pytest.LogCaptureFixture, request_: bytes, more: bytes
) -> None:
    with slow_server.connect() as client:
        client.sendall(request_)
        eventually(lambda: slow_server.web.server_state.tasks)
        client.sendall(more)
        assert error_in(until_closed(client))["code"] == "invalid_http"
    eventually(lambda: not slow_server.web.server_state.tasks)
    assert_no_traceback(log)


def test_a_request_to_upgrade_is_answered_without_a_word_in_the_log(
    server: Serving, log: pytest.LogCaptureFixture
) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert httpx.get(server.url, headers=headers).status_code == 200
    assert not [record for record in log.records if record.levelno >= logging.WARNING]


@in_turn(
    "target host status",
    [
        ("http://localhost/health?a=1", "localhost", 200),
        ("HTTP://LocalHost:80/health", "localhost:80", 200),
        ("http://localhost/nothing", "localhost", 404),
        ("http://evil.example/health", "evil.example", 421),
        ("http://evil.example/health", "localhost", 421),
        ("http://localhost/health", "evil.example", 421),
        ("http://localhost@evil.example/health", "localhost", 421),
        ("http://localhost", "localhost", 404),
    ],
)
def test_a_request_as_to_a_proxy_is_served_by_the_servers_own_names(target: str, host: str, status: int) -> None:
    async def health(_request: Any) -> PlainTextResponse:
        return PlainTextResponse("ok")

    guarded = Guard(Starlette(routes=[Route("/health", health)]), ServerConfig())
    with Serving(guarded) as serving, serving.connect() as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert client.makefile("rb").readline().split()[1] == str(status).encode()
