"""One HTTP connection: what uvicorn leaves to whoever runs it. Peers that are gone, that say nothing, and too many."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.errors import CLOSE, ApiError
from server.listening import notice_lost_peers

HEAD_SECONDS = 10.0  # for a request's line and headers to arrive; what follows them has a limit of its own


class WebConnection(H11Protocol):
    """uvicorn's connection over h11.

    One beyond the limit is answered once, with an error of the API's shape, and closed. uvicorn itself would answer
    in plain text, and anybody who happens to ask while there are too many.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        notice_lost_peers(transport.get_extra_info("socket"))
        if self._most is not None and len(self.connections) > self._most:
            self.app = _too_many
        self._watch_the_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_the_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(error)

    def _watch_the_head(self) -> None:
        """Hang up on a client that begins no request, or does not get on with its head."""
        if self.conn.states != {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}:
            self._stop_watching()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


async def _too_many(scope: Any, receive: Any, send: Any) -> None:
    sentence = "The server has too many connections: try again a little later"
    await ApiError(503, sentence, "busy", headers={"Retry-After": "1", **CLOSE}).response()(scope, receive, send)
