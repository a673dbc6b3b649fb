"""`python -m polarlm.server`: loads a model and serves it until a signal arrives.

Exit codes: 0 after SIGTERM or SIGINT; 1 for an unexpected error, a port in use or missing packages; 2 for an error in a
flag or the model. A second signal ends the process at once, with 128 plus the signal's number.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

from polarlm.engine import Engine, EngineError
from polarlm.engine.cli.flags import FlagError, in_flags, use_utf8
from polarlm.engine.state.plan import parse_size
from polarlm.server.config import GROUPS, KEY_VARIABLE, ServerConfig, read_command_line
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver
from polarlm.server.running.early import EarlyClients
from polarlm.server.running.listening import (
    BACKLOG,
    ListenError,
    address_of,
    allow_open_files,
    is_local,
    quiet_accept_errors,
    tcp_socket,
    unix_socket,
)
from polarlm.server.running.sessions import SessionFolder
from polarlm.server.socket.socket_server import SocketServer

__all__ = ["GROUPS", "main"]

_DRAIN_SECONDS = 30.0
_FAILED, _BAD_REQUEST, _SIGNALLED = 1, 2, 128

MakeWeb = Callable[[Driver, ServerConfig, socket.socket], Any]


class _Missing(Exception):
    """Packages that only the server needs are missing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal arrives, and returns the exit code."""
    use_utf8()
    try:
        _run(sys.argv[1:] if argv is None else argv)
        return 0
    except FlagError as error:
        return _complain(f"{error}; --help lists the flags", _BAD_REQUEST)
    except EngineError as error:
        return _complain(in_flags(error), _BAD_REQUEST)
    except (ListenError, _Missing) as error:
        return _complain(str(error), _FAILED)
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT


def _run(argv: Sequence[str]) -> None:
    model, config = read_command_line(argv)
    make_web = _web()
    with ExitStack() as bound:
        http = bound.enter_context(tcp_socket(config.host, config.port))
        lines: socket.socket | None = None
        if config.unix is not None:
            lines = bound.enter_context(unix_socket(config.unix))
        elif config.socket_port is not None:
            lines = bound.enter_context(tcp_socket(config.host, config.socket_port, "--socket-port"))
        if config.api_key is None and not is_local(http):
            _note(
                f"warning: --host {config.host} lets other machines in, and no key keeps them out: set {KEY_VARIABLE}"
            )
        listeners = 1 if lines is None else 2
        if warning := allow_open_files(listeners * (config.max_connections + BACKLOG)):
            _note(warning)
        events = bound.enter_context(_kv_events(config))
        sessions = None
        if config.sessions is not None:
            sessions = SessionFolder(config.sessions, parse_size(config.max_sessions_size))
        early = bound.enter_context(EarlyClients(http))
        with Engine.load(model.weights, config=model, verbose=_note) as engine:
            missing = engine.model.template.missing(engine.model.name)
            if missing and not engine.model.config.is_encoder:
                _note(missing)
            _note(engine.fit_line())
            if events is not None:
                events.watch(engine)
            journal.set_up()
            asyncio.run(_serve(Driver(engine, config, sessions), make_web, http, lines, early))


def _web() -> MakeWeb:
    """The HTTP server's constructor. Raises _Missing; `_run` calls it before it loads a model."""
    try:
        from polarlm.server.http.app import create_app
        from polarlm.server.http.uvicorn_server import Web
    except ImportError as error:
        raise _Missing(f"{error}: the server needs more packages: pip install 'polarlm[serve]'") from None
    return lambda driver, config, bound: Web(journal.Journaled(create_app(driver, config)), config, bound)


def _kv_events(config: ServerConfig) -> AbstractContextManager[Any]:
    """A context with the publisher of KV events, or with None without --kv-events. Raises _Missing and ListenError."""
    if config.kv_events is None:
        return nullcontext()
    try:
        from polarlm.server.running.kv_events import kv_events
    except ImportError as error:
        raise _Missing(f"{error}: --kv-events needs the packages of polarlm[kv-events]") from None
    if re.match(r"tcp://(127\.|localhost:|\[::1\])|ipc://", config.kv_events) is None:
        _note(f"warning: --kv-events {config.kv_events} sends tokens of prompts to any program that connects to it")
    return kv_events(config.kv_events, config.kv_events_replay, config.kv_events_topic)


async def _serve(
    driver: Driver, make_web: MakeWeb, http: socket.socket, lines: socket.socket | None, early: EarlyClients
) -> None:
    asyncio.get_running_loop().set_exception_handler(quiet_accept_errors())
    await driver.start()
    try:
        web = make_web(driver, driver.config, http)
        servers = [web]
        if lines is not None:
            servers.append(SocketServer(driver, lines))
        waiting = early.hand_over()
        for server in servers:
            await server.start()
        await web.adopt(waiting)
        with _signals() as signalled:
            where = f"Listening at http://{address_of(http)}"
            print(where if lines is None else f"{where} and, for JSON lines, at {address_of(lines)}", flush=True)
            await signalled.wait()
            for server in servers:
                server.refuse()
            await driver.drain(_DRAIN_SECONDS)
            await asyncio.gather(*(server.close() for server in servers))
    finally:
        await driver.stop()


@contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """Yields an event that the first SIGTERM or SIGINT sets; a second signal ends the process."""
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    count = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(_SIGNALLED + number)
        loop.call_soon_threadsafe(signalled.set)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signalled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _complain(sentence: str, code: int) -> int:
    _note(f"error: {sentence}")
    return code


if __name__ == "__main__":
    sys.exit(main())
