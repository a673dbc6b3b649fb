"""The link between a coroutine that waits for a request and the thread that computes it."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from polarlm.engine.requests.request import Ticket

_LOG = logging.getLogger(__name__)


class Mailbox:
    """Threads append items; one coroutine of `loop` reads them. Closing the mailbox cancels its requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []
        self._closed = False

    def append(self, item: Any, /) -> None:
        """Append a chunk, a result, or an exception. Never raises, since that would end the engine's step."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed
            _LOG.debug("a chunk came after the event loop was closed")

    async def next(self) -> Any:
        """Return the next item; raise it if it is an exception."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def keep(self, ticket: Ticket) -> None:
        """Store a ticket of the engine's; cancel its request if the mailbox is closed already."""
        with self._lock:
            self._tickets.append(ticket)
            closed = self._closed
        if closed:
            ticket.cancel()

    def close(self) -> None:
        """Cancel the requests, now or as soon as the engine has them."""
        with self._lock:
            self._closed, tickets = True, self._tickets[:]
        for ticket in tickets:
            ticket.cancel()

    @property
    def closed(self) -> bool:
        """Whether `close` was called: no coroutine waits any more."""
        with self._lock:
            return self._closed

    def end(self, reason: Exception) -> None:
        """Cancel the requests and raise `reason` in the coroutine that reads; called in the event loop."""
        self.close()
        self._items.put_nowait(reason)
