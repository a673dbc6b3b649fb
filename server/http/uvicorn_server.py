"""Runs uvicorn in the caller's event loop, with what it lacks: limits of clients and their time."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from polarlm.server.config import ServerConfig
from polarlm.server.http.errors import CLOSE, ApiError
from polarlm.server.running.listening import BACKLOG, ListenError, address_of, notice_lost_peers
from polarlm.server.running.refusals import TOO_MANY_CONNECTIONS, busy

_LAST_SECONDS = 5  # time for clients to read their last responses
# Longer than clients keep an idle connection (usually 5 seconds): otherwise a request could be sent on a connection
# that the server has just closed.
_IDLE_SECONDS = 30
# Time limit for a request's line and headers to arrive, or for the rest of a body whose request has been answered
# already. Other waits have limits of their own.
HEAD_SECONDS = 10.0
LAST_SECONDS = 1.0  # time for a refused client to read the reason
_MOST_REFUSED = 64  # clients that get LAST_SECONDS at the same time; further ones are closed at once
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class WebConnection(H11Protocol):
    """uvicorn's connection over h11, with errors in the API's shape, which uvicorn would send as plain text."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # uvicorn would refuse any client that sends a request while there are too many, not the latest client.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._is_refused = False
        self._close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = _ClientLogger(self.logger, self.client)  # type: ignore[assignment]
        notice_lost_peers(transport.get_extra_info("socket"))
        if self._most is not None and len(self.connections) - self._count_refused() > self._most:
            self._refuse()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(error)

    def on_response_complete(self) -> None:  # called by uvicorn, as the next methods are
        super().on_response_complete()
        if self._has_answer_before_its_body():
            self._watch()

    def send_400_response(self, msg: str) -> None:
        """Close the connection because of data that is not HTTP, with an error unless a response has begun."""
        waits_for_answer = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None and not self.cycle.response_complete:  # the client is gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if waits_for_answer:
            self._send(ApiError(400, "This is no request that HTTP/1.1 allows", "invalid_http", headers=CLOSE))
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """False, without uvicorn's warning, which advises to install packages."""
        return False

    def _count_refused(self) -> int:
        return sum(isinstance(other, WebConnection) and other._is_refused for other in self.connections)

    def _refuse(self) -> None:
        are_too_many = self._count_refused() >= _MOST_REFUSED
        self._is_refused = True
        refusal = busy(TOO_MANY_CONNECTIONS, 1)
        headers = {"Retry-After": str(refusal.retry_after), **CLOSE}
        self._send(ApiError(503, refusal.message, refusal.code, headers=headers))
        if are_too_many:
            self.transport.close()
        else:  # closing a connection with unread data could discard the answer at the client
            with suppress(OSError):  # it may be gone already
                self.transport.write_eof()
            self._close_timer = self.loop.call_later(LAST_SECONDS, self.transport.close)

    def _send(self, error: ApiError) -> None:
        response = error.response()
        status, reason = error.status, STATUS_PHRASES[error.status]
        head = h11.Response(status_code=status, headers=response.raw_headers, reason=reason)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _watch(self) -> None:
        """Limit the time of a client that sends no request, or a part of one. Bytes that arrive do not extend it."""
        begins = self.conn.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
        if not begins and not self._has_answer_before_its_body():
            self._stop_watching()
        elif self._close_timer is None:
            self._close_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _has_answer_before_its_body(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _stop_watching(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None


class _ClientLogger(logging.LoggerAdapter):
    """A logger that begins each line with the client's address."""

    def __init__(self, logger: logging.Logger, client: tuple[str, int] | None) -> None:
        super().__init__(logger)
        # Without the name of an interface, as in fe80::1%eth0: messages are templates.
        self._client = "unknown" if client is None else f"{client[0].partition('%')[0]}:{client[1]}"
        self.level = logger.level  # uvicorn reads it

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._client}: {msg}", kwargs


class Web(uvicorn.Server):
    """Serves an ASGI application at a listening socket; see `server.running.listening`."""

    def __init__(self, app: ASGIApp, config: ServerConfig, listener: socket.socket) -> None:
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
        self._listener = listener

    async def start(self) -> None:
        """Accept connections from now on. Raises ListenError."""
        self._listen_event = asyncio.Event()
        self._task = asyncio.create_task(self.serve(sockets=[self._listener]))
        listen_task = asyncio.create_task(self._listen_event.wait())
        await asyncio.wait({self._task, listen_task}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            listen_task.cancel()
            where, error = address_of(self._listener), self._task.exception()
            raise ListenError(f"Cannot listen at {where}: {error or 'unknown reason'}") from None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listen_event.set()

    async def adopt(self, connections: Sequence[socket.socket]) -> None:
        loop = asyncio.get_running_loop()
        for connection in connections:
            await loop.connect_accepted_socket(
                lambda: WebConnection(self.config, self.server_state, app_state={}), connection
            )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: `server.__main__` has its own."""
        yield

    async def close(self) -> None:
        """Accept no more connections, wait a few seconds for responses to end, then close all connections."""
        self.should_exit = True
        await self._task


def _in_origin_form(app: ASGIApp) -> ASGIApp:
    """ASGI middleware for clients that take the server for a proxy, `GET http://host/health`: the target's host becomes
    the header Host. If the client has sent another one there, the guard sees both, and refuses that."""

    async def middleware(scope: Scope, receive: Receive, send: Send) -> None:
        if target := _ABSOLUTE.fullmatch(scope.get("raw_path", b"")):
            host, path = target[1].lower(), target[2] or b"/"
            others = [item for item in scope["headers"] if item[0] != b"host" or item[1].lower() != host]
            scope.update(headers=[*others, (b"host", host)], raw_path=path, path=unquote(path.decode("ascii")))
        await app(scope, receive, send)

    return middleware
