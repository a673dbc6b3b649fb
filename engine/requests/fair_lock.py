"""One thread at a time, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import EngineError
from model_loaders.forks import renew_in_children


class FairLock:
    """A lock that is handed on in order.

    A plain lock would nearly always go back to the thread that has just released it: one that takes it for every token
    of a long answer would keep out all others until it is done.
    """

    def __init__(self, *, forkable: bool = True) -> None:
        """forkable: whether what is worked on in turns can be used in a forked child."""
        self._forkable = forkable
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self.taken = False
        self._whose = 0  # the thread whose turn it is, while it is taken
        self.lost = ""  # why nothing can be done in this process any more; empty where it can
        renew_in_children(self)

    def renew(self) -> None:
        """Make the lock anew in a forked child, where only one thread is left."""
        self._changed = threading.Condition()
        self._line.clear()
        left_off = self.taken and self._whose != threading.get_ident()
        self.taken = self.taken and not left_off
        if not self._forkable:
            self.lost = "An engine on a GPU cannot be used in a forked process: load one in each process"
        elif left_off:
            self.lost = (
                "This process was forked in the middle of the engine's work, of which it has no more than a part: fork "
                "while no request is under way, or load an engine in each process"
            )

    def check(self) -> None:
        """Raises EngineError where `lost` says why."""
        if self.lost:
            raise EngineError(self.lost, "forked")

    @contextmanager
    def take(self, unless: Any = ()) -> Iterator[bool]:
        """True in one thread at a time; False, and no exclusion, once `unless` has become true."""
        place, mine = object(), False
        try:
            with self._changed:
                self._line.append(place)
                try:
                    self._changed.wait_for(lambda: unless or (not self.taken and self._line[0] is place))
                finally:
                    self._line.remove(place)
                    self._changed.notify_all()
                mine = not unless
                if mine:
                    self.taken, self._whose = True, threading.get_ident()
            yield mine
        finally:
            if mine:
                with self._changed:
                    self.taken = False
                    self._changed.notify_all()

    def if_free(self, work: Callable[[], None]) -> None:
        """Do `work` in nobody's turn, or not at all. Never waits for a turn to end, and may be called inside one."""
        with self._changed:
            if not self.taken:
                work()
