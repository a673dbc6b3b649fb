"""A job: a request that a coroutine waits for. A worker: a thread for work that may never end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from polarlm.engine.requests.mailbox import Mailbox
from polarlm.engine.requests.prompts import read_until
from polarlm.server.running import journal

_LOG = logging.getLogger(__name__)


class Job(Mailbox):
    """A mailbox with what the log and the counters need of its request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, entry: journal.Entry | None = None) -> None:
        super().__init__(loop)
        self.entry = entry or journal.Entry("", "")
        self.start_time = time.monotonic()
        self.outcome = "cancelled"
        self.append_time = self.start_time  # when the newest item that was read was appended
        self.last_token_time: float | None = None  # when the newest chunk with a token was appended
        self._times: deque[float] = deque()  # when each unread item was appended

    def append(self, item: Any, /) -> None:
        self._times.append(time.monotonic())
        super().append(item)

    async def next(self) -> Any:
        """The next item; sets `append_time` to the time when it was appended. Raises it if it is an exception."""
        item = await super().next()
        self.append_time = self._times.popleft()
        return item

    def do(self, work: Callable[[], Any]) -> None:
        """Call `work` and append its result or its error; do nothing if the job is closed already. Once it is closed,
        `work` waits for no process that reads prompts."""
        try:
            if not self.closed:
                with read_until(lambda: self.closed):
                    self.append(work())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.append(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))


class Worker:
    """Runs functions in order, in a thread that does not keep the process from ending: a pool's threads are joined at
    exit, where a disk may hang."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`. What it raises goes to the log: nobody waits for it here."""
        self._queue.put(work)

    def stop(self, seconds: float) -> bool:
        """Drop functions that have not begun; wait up to `seconds` for the running one, and return whether it ended."""
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic of a library in Rust is no Exception
                _LOG.exception("work in the thread %s failed", self._thread.name)
