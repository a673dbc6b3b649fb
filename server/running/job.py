"""A job: a request that a coroutine waits for, and what the server knows of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from polarlm.engine.requests.mailbox import Mailbox


class Job(Mailbox):
    """A mailbox with what the log and the counters need of its request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.started = time.monotonic()
        self.outcome = "cancelled"
        self.appended = self.started
        self.token_came: float | None = None
        self._times: deque[float] = deque()  # when each unread item was appended

    def append(self, item: Any, /) -> None:
        self._times.append(time.monotonic())
        super().append(item)

    async def next(self) -> Any:
        """The next item; sets `appended` to the time when it was appended. Raises it if it is an exception."""
        item = await super().next()
        self.appended = self._times.popleft()
        return item

    def do(self, work: Callable[[], Any]) -> None:
        """Call `work` and append its result or its error; do nothing if the job is closed already."""
        try:
            if not self.closed:
                self.append(work())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.append(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
