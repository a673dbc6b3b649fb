"""A FIFO lock for threads, which also tells a forked child whether the state that it guards is usable."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from polarlm.engine.errors import EngineError
from polarlm.model_loaders.forks import renew_in_children


class FairLock:
    """Threads acquire it in the order in which they asked for it.

    A plain lock is nearly always taken again by the thread that has just released it, so a thread that takes it for
    every token of a long answer would starve the others.
    """

    def __init__(self, *, forkable: bool = True) -> None:
        """forkable: whether a forked child can use the state that the lock guards."""
        self._forkable = forkable
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self.taken = False
        self._owner = 0  # the thread that holds the lock, while it is taken
        self.lost = ""  # why this process cannot use the guarded state; empty if it can
        renew_in_children(self)

    def renew(self) -> None:
        """Replace the lock in a forked child, in which only one thread is left."""
        self._changed = threading.Condition()
        self._queue.clear()
        interrupted = self.taken and self._owner != threading.get_ident()
        self.taken = self.taken and not interrupted
        if not self._forkable:
            self.lost = "An engine on a GPU cannot be used in a forked process: load one in each process"
        elif interrupted:
            self.lost = (
                "This process was forked while the engine was computing, so its copy of the engine is incomplete: fork "
                "while no request is under way, or load an engine in each process"
            )

    @property
    def is_wanted(self) -> bool:
        """Whether a thread holds the lock, or waits for it."""
        return self.taken or bool(self._queue)

    def check(self) -> None:
        """Raises EngineError ("forked") if this process cannot use the guarded state."""
        if self.lost:
            raise EngineError(self.lost, "forked")

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self.hold_unless(()):
            yield

    @contextmanager
    def hold_unless(self, ready: Any) -> Iterator[bool]:
        """Hold the lock and yield True; if `ready` becomes true first, or is already, yield False without the lock.
        `ready` is tested whenever the lock changes hands."""
        place, held = object(), False
        try:
            with self._changed:
                self._queue.append(place)
                try:
                    self._changed.wait_for(lambda: ready or (not self.taken and self._queue[0] is place))
                finally:
                    self._queue.remove(place)
                    self._changed.notify_all()
                held = not ready
                if held:
                    self.taken, self._owner = True, threading.get_ident()
            yield held
        finally:
            if held:
                with self._changed:
                    self.taken = False
                    self._changed.notify_all()

    def if_free(self, work: Callable[[], None]) -> None:
        """Call `work` if no thread holds the lock. Never waits for the holder, which may call it, too."""
        with self._changed:
            if not self.taken:
                work()
