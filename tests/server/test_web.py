"""HTTP connections as such: how many there may be, how long they may say nothing, and whether anybody is there."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from server import web, web_connection
from server.config import ServerConfig
from server.listening import tcp_socket
from server.web import Web
from tests.server.lines import PATIENCE, eventually

MOST = 3


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Serving:
    """`app` at a free port, in an event loop of its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.bound = tcp_socket("127.0.0.1", 0)
        self.address = self.bound.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self.web = self.call(self._make())
        self.call(self.web.start())

    async def _make(self) -> Web:
        return Web(app, ServerConfig(max_connections=MOST), self.bound)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    @property
    def connections(self) -> set[Any]:
        return self.web.server_state.connections

    def stop(self) -> None:
        self.call(self.web.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def server() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.stop()


def test_too_many_connections_are_an_error_of_the_apis_shape(server: Serving) -> None:
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
        assert clients[0].get("/").status_code == 200  # who has been there before has not lost its place
    eventually(lambda: not server.connections)
    assert httpx.get(server.url).status_code == 200


def test_a_peer_that_is_gone_without_a_word_is_noticed(server: Serving) -> None:
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
    monkeypatch.setattr(web_connection, "HEAD_SECONDS", 0.1)
    with server.connect() as client:
        for _ in range(before):
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            received = b""
            while not received.endswith(b"ok"):
                received += client.recv(4096)
        client.sendall(begun)
        assert client.recv(4096) == b""


def test_between_requests_a_connection_stays_longer_than_clients_keep_it(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_connection, "HEAD_SECONDS", 0.05)
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/").status_code == 200
        (before,) = server.connections
        threading.Event().wait(0.3)
        assert client.get("/").status_code == 200
        assert server.connections == {before}
    assert httpx.Limits().keepalive_expiry is not None
    assert 2 * httpx.Limits().keepalive_expiry < web._IDLE_SECONDS
