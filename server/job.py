"""A job: what the server knows of a request that a coroutine waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from polarlm.engine.requests.mailbox import Mailbox


class Job(Mailbox):
    """A mailbox with what the log and the counters say of its request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.started = time.monotonic()
        self.outcome = "cancelled"

    def do(self, work: Callable[[], Any]) -> None:
        """Append the result or the error of `work`; nothing if the job is closed already."""
        try:
            if not self.closed:
                self.append(work())
        except Exception as error:
            self.append(error)
