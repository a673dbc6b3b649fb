"""One thread at a time, in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """A lock that is handed on in order.

    A plain lock would nearly always go back to the thread that has just released it: one that takes it for every token
    of a long answer would keep out all others until it is done.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self.taken = False

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
                self.taken = self.taken or mine
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
