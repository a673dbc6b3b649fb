"""Serves an application of one model or of several until a signal arrives."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from starlette.types import ASGIApp

from polarlm.server.http.app import create_app
from polarlm.server.http.uvicorn_server import Web
from polarlm.server.mcp.session import McpServers
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver
from polarlm.server.running.listening import EarlyClients, quiet_accept_errors
from polarlm.server.socket.connection import SocketServer

_DRAIN_SECONDS = 30.0
SIGNALLED = 128  # and the signal's number: the exit code after a second signal


async def serve_engine(
    driver: Driver,
    http: socket.socket,
    lines: socket.socket | None,
    early: EarlyClients | None,
    ready: Callable[[], None],
    outer: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> None:
    """Serve the driver's engine over HTTP at `http`, and JSON lines at `lines`, until a signal arrives. early: has
    accepted clients until now. ready: called when requests are taken. outer: wraps the application."""
    asyncio.get_running_loop().set_exception_handler(quiet_accept_errors())
    servers = McpServers(driver.config)
    await driver.start()
    try:
        app = outer(journal.Journaled(create_app(driver, driver.config, servers)))
        web = Web(app, driver.config, http)
        accepting: list[Web | SocketServer] = [web] if lines is None else [web, SocketServer(driver, lines)]
        waiting = [] if early is None else early.hand_over()
        for server in accepting:
            await server.start()
        await web.adopt(waiting)
        await until_signalled(accepting, ready, lambda: asyncio.gather(driver.drain(_DRAIN_SECONDS), servers.close()))
    finally:
        await servers.close()
        await driver.stop()


async def until_signalled(
    servers: Sequence[Web | SocketServer], ready: Callable[[], None], drain: Callable[[], Awaitable[object]]
) -> None:
    """Wait for SIGTERM or SIGINT, accept no more connections, `drain`, and close the servers, which have been started.
    ready: called when signals are handled."""
    with _signals() as signalled:
        ready()
        await signalled.wait()
        for server in servers:
            server.refuse()
        await drain()
        await asyncio.gather(*(server.close() for server in servers))


@contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """Yields an event that the first SIGTERM or SIGINT sets; a second signal ends the process."""
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    count = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(SIGNALLED + number)
        loop.call_soon_threadsafe(signalled.set)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
