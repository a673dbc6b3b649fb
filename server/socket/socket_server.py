"""The socket: JSON lines over TCP or a Unix socket, as docs/socket-protocol.md describes them."""

from __future__ import annotations

import asyncio
import socket

from polarlm.server.running.driver import Driver
from polarlm.server.running.listening import BACKLOG
from polarlm.server.socket.connection import Connection

_LAST_SECONDS = 5.0  # time for clients to read their last messages


class SocketServer:
    """Serves the clients of one listening socket; see `server.running.listening`."""

    def __init__(self, driver: Driver, bound: socket.socket) -> None:
        self._driver = driver
        self._bound = bound
        self._connections: set[Connection] = set()

    async def start(self) -> None:
        """Accept connections from now on."""
        loop = asyncio.get_running_loop()
        unix = self._bound.family == getattr(socket, "AF_UNIX", None)
        create = loop.create_unix_server if unix else loop.create_server
        self._server = await create(
            lambda: Connection(self._driver, self._connections), sock=self._bound, backlog=BACKLOG
        )

    def refuse(self) -> None:
        """Accept no more connections; open connections continue."""
        self._server.close()

    async def close(self) -> None:
        """Close all connections after their last messages are sent. The driver must have been drained."""
        self.refuse()
        await asyncio.gather(*(connection.close(_LAST_SECONDS) for connection in list(self._connections)))
