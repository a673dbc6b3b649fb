"""A cache that drops the least recently used values when it is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

from polarlm.model_loaders.forks import renew_in_children

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """A cache of the most recently used values, by key. The sizes of all values together are at most `limit`, except
    for a single value. Thread-safe, also in a forked child."""

    def __init__(self, limit: float, size: Callable[[Value], Any] = lambda value: 1) -> None:
        """size: of a value."""
        self._limit, self._size_of = limit, size
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self.size: Any = 0  # of all values
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def peek(self, key: Key) -> Value | None:
        """The value of a key; does not refresh its age."""
        return self._values.get(key)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        with self._lock:
            self._remove(key)
            self._values[key] = value
            self.size += self._size_of(value)
            while self.size > self._limit and len(self._values) > 1:
                self._remove(next(iter(self._values)))

    def drop(self, key: Key) -> None:
        with self._lock:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        if key in self._values:
            self.size -= self._size_of(self._values.pop(key))
