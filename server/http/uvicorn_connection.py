"""One HTTP connection, with what uvicorn lacks: detection of dead peers, a time limit for headers, a client limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from polarlm.server.http.errors import CLOSE, ApiError
from polarlm.server.running.listening import notice_lost_peers
from polarlm.server.running.refused import TOO_MANY_CONNECTIONS, busy

# Time limit for a request's line and headers to arrive, or for the rest of a body whose request has been answered
# already. Other waits have limits of their own.
HEAD_SECONDS = 10.0
LAST_SECONDS = 1.0  # time for a refused client to read the reason
_MOST_REFUSED = 64  # clients that get LAST_SECONDS at the same time; further ones are closed at once


class WebConnection(H11Protocol):
    """uvicorn's connection over h11, with errors in the API's shape, which uvicorn would send as plain text."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # uvicorn would refuse any client that sends a request while there are too many, not the latest client.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._refused = False
        self._waiting: asyncio.TimerHandle | None = None

    # -- called by the event loop ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = _Addressed(self.logger, self.client)  # type: ignore[assignment]
        notice_lost_peers(transport.get_extra_info("socket"))
        if self._is_one_too_many():
            self._refuse()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(error)

    # -- called by uvicorn -------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
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

    # -- too many connections, and slow ones -------------------------------------------------------------------

    def _is_one_too_many(self) -> bool:
        return self._most is not None and len(self.connections) - self._others_refused() > self._most

    def _others_refused(self) -> int:
        return sum(isinstance(other, WebConnection) and other._refused for other in self.connections)

    def _refuse(self) -> None:
        """Send the error at once, without waiting for a request."""
        at_once = self._others_refused() >= _MOST_REFUSED
        self._refused = True
        refusal = busy(TOO_MANY_CONNECTIONS, 1)
        headers = {"Retry-After": str(refusal.retry_after), **CLOSE}
        self._send(ApiError(503, refusal.message, refusal.code, headers=headers))
        if at_once:
            self.transport.close()
        else:  # closing a connection with unread data could discard the answer at the client
            with suppress(OSError):  # it may be gone already
                self.transport.write_eof()
            self._waiting = self.loop.call_later(LAST_SECONDS, self.transport.close)

    def _send(self, error: ApiError) -> None:
        response = error.response()
        for event in (
            h11.Response(status_code=error.status, headers=response.raw_headers, reason=STATUS_PHRASES[error.status]),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _watch(self) -> None:
        """Start or stop the time limit of a client that sends no request, an incomplete head, or an incomplete body.

        Bytes that arrive do not extend the time.
        """
        begins = self.conn.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}
        if not begins and not self._has_answer_before_its_body():
            self._stop_watching()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _has_answer_before_its_body(self) -> bool:
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _stop_watching(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Addressed(logging.LoggerAdapter):
    """A logger that begins each line with the client's address."""

    def __init__(self, logger: logging.Logger, client: tuple[str, int] | None) -> None:
        super().__init__(logger)
        # Without the name of an interface, as in fe80::1%eth0: messages are templates.
        self._client = "unknown" if client is None else f"{client[0].partition('%')[0]}:{client[1]}"
        self.level = logger.level  # uvicorn reads it

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self._client}: {msg}", kwargs
