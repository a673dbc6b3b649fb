"""What a client waits for, seen from the event loop and from the engine's thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from engine.requests.request import Ticket

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request between the loop and who works on it in a thread: a queue for the one, an outbox for the other."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    started: float = field(default_factory=time.monotonic)
    outcome: str = "cancelled"

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ticket: Ticket | None = None
        self._closed = False

    def append(self, item: Any, /) -> None:
        """Hand over a chunk, a result, or an exception in its place; nothing that this raises may reach a step."""
        try:
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, item)
        except RuntimeError:  # the loop is closed, and nobody reads any more
            _LOG.debug("a chunk came after the event loop was closed")

    def queued(self, ticket: Ticket) -> None:
        """The engine has the request; maybe nobody wants it any more."""
        with self._lock:
            self._ticket, closed = ticket, self._closed
        if closed:
            ticket.cancel()

    def close(self) -> None:
        """Have the engine drop the request, now or as soon as it has it."""
        with self._lock:
            self._closed, ticket = True, self._ticket
        if ticket is not None:
            ticket.cancel()

    @property
    def closed(self) -> bool:
        """Whether nobody waits for it any more."""
        with self._lock:
            return self._closed

    def end(self, reason: Exception) -> None:
        """End the request with an error for its reader; in the event loop."""
        self.close()
        self.arrived.put_nowait(reason)
