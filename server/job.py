"""A job: the link between a coroutine that waits and the thread that computes for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine.requests.request import Ticket

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request of the event loop that a thread works on: the loop reads its queue, the thread appends to it."""

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    started: float = field(default_factory=time.monotonic)
    outcome: str = "cancelled"

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ticket: Ticket | None = None
        self._closed = False

    def append(self, item: Any, /) -> None:
        """Append a chunk, a result, or an exception in its place. Never raises: that would end the engine's step."""
        try:
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, item)
        except RuntimeError:  # the loop is closed
            _LOG.debug("a chunk came after the event loop was closed")

    def do(self, work: Callable[[], Any]) -> None:
        """Append the result or the error of `work`; nothing if the job is closed already."""
        try:
            if not self.closed:
                self.append(work())
        except Exception as error:
            self.append(error)

    def queued(self, ticket: Ticket) -> None:
        """Note the engine's ticket; cancel the request if the job is closed already."""
        with self._lock:
            self._ticket, closed = ticket, self._closed
        if closed:
            ticket.cancel()

    def close(self) -> None:
        """Cancel the request, now or as soon as the engine has it."""
        with self._lock:
            self._closed, ticket = True, self._ticket
        if ticket is not None:
            ticket.cancel()

    @property
    def closed(self) -> bool:
        """Whether `close` has been called: no coroutine waits for the job."""
        with self._lock:
            return self._closed

    def end(self, reason: Exception) -> None:
        """Cancel the request and raise `reason` in the coroutine that reads it; called in the event loop."""
        self.close()
        self.arrived.put_nowait(reason)
