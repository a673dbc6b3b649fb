"""Runs uvicorn in the caller's event loop, without uvicorn's signal handlers."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from polarlm.server.config import ServerConfig
from polarlm.server.http.uvicorn_connection import WebConnection
from polarlm.server.running.listening import BACKLOG, ListenError, address_of

_LAST_SECONDS = 5  # time for clients to read their last responses
# Longer than clients keep an idle connection (usually 5 seconds): otherwise a request could be sent on a connection
# that the server has just closed.
_IDLE_SECONDS = 30
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class Web(uvicorn.Server):
    """Serves an ASGI application at a listening socket; see `server.running.listening`."""

    def __init__(self, app: ASGIApp, config: ServerConfig, bound: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                _in_origin_form(app),
                http=WebConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # they would let any client claim any address
                backlog=BACKLOG,
                limit_concurrency=config.max_connections,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        self._bound = bound

    async def start(self) -> None:
        """Accept connections from now on. Raises ListenError."""
        self._listens = asyncio.Event()
        self._task = asyncio.create_task(self.serve(sockets=[self._bound]))
        listens = asyncio.create_task(self._listens.wait())
        await asyncio.wait({self._task, listens}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            listens.cancel()
            where, error = address_of(self._bound), self._task.exception()
            raise ListenError(f"Cannot listen at {where}: {error or 'unknown reason'}") from None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listens.set()

    async def adopt(self, accepted: Sequence[socket.socket]) -> None:
        """Serve connections that were accepted elsewhere."""
        loop = asyncio.get_running_loop()
        for connected in accepted:
            await loop.connect_accepted_socket(
                lambda: WebConnection(self.config, self.server_state, app_state={}), connected
            )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: `server.__main__` has its own."""
        yield

    def refuse(self) -> None:
        """Accept no more connections; open connections continue."""
        for server in self.servers:
            server.close()

    async def close(self) -> None:
        """Wait a few seconds for responses to end, then close all connections."""
        self.should_exit = True
        await self._task


def _in_origin_form(app: ASGIApp) -> ASGIApp:
    """ASGI middleware for requests of clients that take the server for a proxy: `GET http://host/health`.

    The host of the target becomes the header Host. If the client has sent another one there, the guard sees both, and
    refuses that.
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if target := _ABSOLUTE.fullmatch(scope.get("raw_path", b"")):
            host, path = target[1].lower(), target[2] or b"/"
            others = [item for item in scope["headers"] if item[0] != b"host" or item[1].lower() != host]
            scope.update(headers=[*others, (b"host", host)], raw_path=path, path=unquote(path.decode("ascii")))
        await app(scope, receive, send)

    return wrapped
