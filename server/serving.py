"""Serves an application of one model or of several until a signal arrives."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import FrameType

import httpx
from starlette.types import ASGIApp

from polarlm.engine import Engine, EngineError
from polarlm.engine.cli.commands import note_in_flags
from polarlm.engine.config import EngineConfig, parse_size
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import create_app
from polarlm.server.http.openai.lines import LineFiles, answer_lines
from polarlm.server.http.uvicorn_server import Web
from polarlm.server.mcp.session import McpServers
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver
from polarlm.server.running.journal import note
from polarlm.server.running.listening import EarlyClients, quiet_accept_errors
from polarlm.server.running.sessions import SessionFolder
from polarlm.server.socket.connection import SocketServer

_DRAIN_SECONDS = 30.0
_NO_LIMIT = 1 << 30  # bytes of a request, and seconds of an answer, where a file is answered
SIGNAL_EXIT_CODE = 128  # and the signal's number: the exit code after a second signal


@contextmanager
def load_driver(model: EngineConfig, config: ServerConfig, log_name: str | None = None) -> Iterator[Driver]:
    """Load a model, set the log up, and yield the driver. log_name: a name in lines of the log. Raises EngineError."""
    folder, most = config.sessions, parse_size(config.max_sessions_size)
    sessions = None if folder is None else SessionFolder(folder, most)
    with Engine.load(model.weights, config=model, verbose=lambda sentence: note(note_in_flags(sentence))) as engine:
        if config.alias is not None:
            engine.model = replace(engine.model, name=config.alias)
        note_on_template = engine.model.template.missing_note(engine.model.name)
        if note_on_template and not engine.model.config.is_encoder:
            note(note_on_template)
        note(engine.fit_line())
        if (most := engine.model.generation.max_tokens) >= 0 and config.max_tokens is None:
            note(f"Answers of this model end after {most} tokens, unless a request or --max-tokens says otherwise")
        for name in reversed(engine.packs):  # if there is no room for all, the first ones stay
            try:
                engine.load_pack(name)
            except EngineError as error:  # requests that name it are told, too
                note(f"warning: {error}")
        journal.set_up(log_name)
        yield Driver(engine, config, sessions)


async def serve_engine(
    driver: Driver,
    http: socket.socket,
    lines: socket.socket | None,
    early_clients: EarlyClients | None,
    ready: Callable[[], None],
    outer: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> None:
    """Serve the driver's engine over HTTP at `http`, and JSON lines at `lines`, until a signal arrives. early_clients:
    has accepted clients until now. ready: called when requests are taken. outer: wraps the application. Raises
    DeviceLost once all requests have ended if the engine's device works no more."""
    asyncio.get_running_loop().set_exception_handler(quiet_accept_errors())
    servers = McpServers(driver.config)
    app = create_app(driver, driver.config, servers)
    await driver.start()
    try:
        web = Web(outer(journal.JournalMiddleware(app)), driver.config, http)
        listening_servers: list[Web | SocketServer] = [web] if lines is None else [web, SocketServer(driver, lines)]
        early_connections = [] if early_clients is None else early_clients.hand_over()
        for server in listening_servers:
            await server.start()
        await web.adopt(early_connections)
        ends, seconds = driver.end_event, _DRAIN_SECONDS
        await serve_until_signal(
            ends, listening_servers, ready, lambda: asyncio.gather(driver.drain(seconds), servers.close())
        )
    finally:
        await servers.close()
        await driver.stop()
    if driver.device_lost is not None:
        raise driver.device_lost


def answer_files(
    model: EngineConfig, files: LineFiles, progress: AbstractContextManager[Callable[[str], None]]
) -> None:
    """Answer what has no answer yet, without a port. progress: once the model is loaded, yields a function that is
    called after each answer. Raises OSError and EngineError."""
    with load_driver(model, ServerConfig(max_body=_NO_LIMIT, request_seconds=_NO_LIMIT)) as driver, progress as say:
        asyncio.run(_answer_files(driver, files, lambda: say("")))


async def _answer_files(driver: Driver, files: LineFiles, say: Callable[[], None]) -> None:
    await driver.start()
    transport = httpx.ASGITransport(create_app(driver, driver.config), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await answer_lines(files, client, driver.engine.config.parallel, say)
    finally:
        await driver.stop()


async def serve_until_signal(
    ends: asyncio.Event,
    servers: Sequence[Web | SocketServer],
    ready: Callable[[], None],
    drain: Callable[[], Awaitable[object]],
) -> None:
    """Wait for SIGTERM, SIGINT or the event `ends`, `drain`, and close the servers, which have been started: until then
    monitors and clients are told that no more requests are taken. ready: called when signals are handled."""
    with _signals(ends):
        ready()
        await ends.wait()
        await drain()
        await asyncio.gather(*(server.close() for server in servers))


@contextmanager
def _signals(ends: asyncio.Event) -> Iterator[None]:
    """A context in which the first SIGTERM or SIGINT sets the event; a second signal ends the process."""
    loop = asyncio.get_running_loop()
    count = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(SIGNAL_EXIT_CODE + number)
        loop.call_soon_threadsafe(ends.set)

    old_handlers = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
