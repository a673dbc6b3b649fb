"""A tier in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from polarlm.engine.storage.tiers.tier_store import Held
from polarlm.model_loaders.forks import renew_in_children


class Memory:
    """Objects in at most `size` bytes of memory."""

    label = place = "ram"

    def __init__(self, size: int):
        self._size, self._held = size, 0  # bytes
        self._objects: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._lock = Lock()
        renew_in_children(self)

    def renew(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may hold it."""
        self._lock = Lock()

    @property
    def held(self) -> Held:
        return Held(self._held, len(self._objects))

    def has(self, name: bytes) -> bool:
        return name in self._objects

    def read(self, name: bytes) -> bytes | None:
        return self._objects.get(name)

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        size = len(header) + len(payload)
        if size > self._size:
            return
        with self._lock:
            self._held -= len(self._objects.pop(name, b""))
            while self._held + size > self._size:
                _, oldest = self._objects.popitem(last=False)
                self._held -= len(oldest)
            self._objects[name] = b"".join((header, payload))
            self._held += size

    def remove(self, name: bytes) -> None:
        with self._lock:
            if (removed := self._objects.pop(name, None)) is not None:
                self._held -= len(removed)

    def used(self, names: Sequence[bytes]) -> None:
        with self._lock:
            for name in reversed(names):
                if name in self._objects:
                    self._objects.move_to_end(name)
