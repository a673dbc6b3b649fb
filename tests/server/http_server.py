"""The HTTP API over an engine, in a thread with an event loop of its own, at a free port."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn.server

from polarlm.engine import Engine
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import create_app
from polarlm.server.mcp.session import McpServers
from polarlm.server.running.driver import Driver
from polarlm.server.running.journal import JournalMiddleware
from polarlm.server.running.listening import tcp_socket
from polarlm.server.running.sessions import SessionFolder
from polarlm.server.socket.connection import SocketServer
from tests.lazily import anthropic, openai
from tests.server.lines import PATIENCE

LAST_SECONDS = 10  # for connections that a failed test has left open, once the server is told to end
KEY = "sk-of-this-server"


class _Hasty:
    """asyncio, as `uvicorn.server` sees it here: its server looks ten times a second whether it should end, and waits
    as long for what it has ended, a fifth of a second at the end of each of hundreds of tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


uvicorn.server.asyncio = _Hasty()  # type: ignore[assignment]


class Gate:
    """Lets the engine do as many units of work as it is given; open to begin with."""

    def __init__(self, engine: Engine) -> None:
        self._work = engine.work
        self._units = 0
        self._open = True
        self._changed = threading.Condition()  # held by a unit of work: whoever closes the gate waits for its end
        engine.work = self._pass  # type: ignore[method-assign]

    def _pass(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._units)
            self._units -= not self._open
            return self._work()

    def close(self) -> None:
        with self._changed:
            self._open, self._units = False, 0

    def let(self, units: int) -> None:
        with self._changed:
            self._units += units
            self._changed.notify_all()

    def let_another(self) -> None:
        """One more unit, unless there is one left."""
        with self._changed:
            self.let(not self._units)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()


@dataclass
class Serving:
    engine: Engine
    driver: Driver
    gate: Gate
    loop: asyncio.AbstractEventLoop
    port: int
    http: httpx.Client
    openai: openai.OpenAI
    address: Any = None  # the socket's, if there is one

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def anthropic(self, key: str = "any") -> anthropic.Anthropic:
        """Anthropic's own client, for a `with` block."""
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=PATIENCE)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def chat(self, **body: Any) -> dict[str, Any]:
        """The only choice of an answer."""
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice

    def refused(self, path: str, body: Any, status: int = 400) -> Any:
        """The error of a request that is refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def send(self, path: str, body: Any, receive_buffer: int | None = None) -> socket.socket:
        """A connection whose request has been sent; the system receives no more than the buffer takes."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.socket()
        connection.settimeout(PATIENCE)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    @property
    def busy(self) -> bool:
        status = self.engine.status()
        return bool(status.running or status.waiting)

    def is_idle(self) -> bool:
        """Nothing is computed, nothing waits, and no request holds a block."""
        return not self.busy and self.engine.status().blocks_used == 0

    def outcomes(self) -> dict[str, int]:
        return dict(self.driver.snapshot().requests)

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)


@contextmanager
def serving(
    engine: Engine, *, send_buffer: int | None = None, lines: socket.socket | None = None, **settings: Any
) -> Iterator[Serving]:
    """A server of `engine` with `settings` of ServerConfig; at the end it is stopped, with whatever is under way.

    send_buffer: bytes that the system may hold for a client that does not read. lines: where it also serves the socket.
    """
    listener = tcp_socket("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    config = ServerConfig(port=port, **settings)
    ready: list[tuple[Driver, asyncio.AbstractEventLoop]] = []
    started, gate = threading.Event(), Gate(engine)
    server: uvicorn.Server

    async def main() -> None:
        nonlocal server
        sessions = None if config.sessions is None else SessionFolder(config.sessions, 1 << 30)
        driver = Driver(engine, config, sessions)
        await driver.start()
        mcp = McpServers(config)
        app = create_app(driver, config, mcp)
        server = uvicorn.Server(quiet_config(JournalMiddleware(app)))
        ready.append((driver, asyncio.get_running_loop()))
        socket_server = None if lines is None else SocketServer(driver, lines)
        if socket_server is not None:
            await socket_server.start()
        started.set()
        await server.serve(sockets=[listener])
        if socket_server is not None:
            await driver.drain(0)
            await socket_server.close()
        await mcp.close()
        await driver.stop()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="http", daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    url, key = f"http://127.0.0.1:{port}", config.api_key or "any"
    bearer = {"Authorization": f"Bearer {key}"}
    try:
        with (
            httpx.Client(base_url=url, headers=bearer, timeout=PATIENCE) as http,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as client,
        ):
            address = None if lines is None else lines.getsockname()
            yield Serving(engine, ready[0][0], gate, ready[0][1], port, http, client, address)
    finally:
        gate.open()
        server.should_exit = True
        join(thread, *(loop for _, loop in ready))


def quiet_config(app: Any) -> uvicorn.Config:
    """Of a server that logs nothing, and ends when it is told to, even if a test has left a stream open."""
    return uvicorn.Config(app, http="h11", log_level="critical", lifespan="off", timeout_graceful_shutdown=LAST_SECONDS)


def join(thread: threading.Thread, *loops: asyncio.AbstractEventLoop) -> None:
    """Wait until the thread of a server that was told to end has ended; fail if it does not.

    What all threads and the tasks of `loops` are doing is then on standard error, which pytest shows.
    """
    thread.join(PATIENCE)
    if thread.is_alive():
        faulthandler.dump_traceback(sys.stderr)
        for loop in loops:
            for task in asyncio.all_tasks(loop):
                task.print_stack()
        raise AssertionError(f"The thread {thread.name} did not end within {PATIENCE:.0f} seconds")
