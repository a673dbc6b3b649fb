"""A thread for work that may never end, such as writing to a disk that hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

_LOG = logging.getLogger(__name__)


class Worker:
    """Runs functions in order, in a thread that does not keep the process from ending.

    Threads of a pool are joined at exit, so a disk that hangs would keep the process from ending.
    """

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
