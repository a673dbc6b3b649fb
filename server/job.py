"""What a client waits for, seen from the event loop and from the engine's thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field

from engine import Chunk
from engine.request import Ticket

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request between the loop and the engine: an outbox for the one, a queue for the other."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[Chunk | Exception] = field(default_factory=asyncio.Queue)
    started: float = field(default_factory=time.monotonic)
    outcome: str = "cancelled"

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ticket: Ticket | None = None
        self._closed = False

    def append(self, item: Chunk | Exception, /) -> None:
        """The outbox of the engine; nothing it raises may reach a step."""
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

    def end(self, reason: Exception) -> None:
        """End the request with an error for its reader; in the event loop."""
        self.close()
        self.arrived.put_nowait(reason)
