"""A place whose trouble is no error: it has nothing for a while, takes nothing, and the log says so once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from polarlm.engine.tiers.places import Place

_LOG = logging.getLogger(__name__)
_TROUBLED = 30.0  # seconds without reading after an error of reading, such as a server that is gone; as for writing

T = TypeVar("T")


class Guarded:
    """A place that raises no OSError. Reading and writing are left alone apart: a full disk can be read."""

    def __init__(self, place: Place):
        self.label = place.label
        self._place = place
        self._rests = {"read": 0.0, "written": 0.0}  # until when
        self._complained: set[str] = set()

    @property
    def takes_writes(self) -> bool:
        """Whether the last write was no error, or is long ago."""
        return self._rests["written"] <= time.monotonic()

    def has(self, name: bytes) -> bool:
        return self._try("read", lambda: self._place.has(name), False)

    def read(self, name: bytes) -> bytes | bytearray | memoryview | None:
        return self._try("read", lambda: self._place.read(name), None)

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        self._try("written", lambda: self._place.write(name, header, payload), None)

    def remove(self, name: bytes) -> None:
        self._try("written", lambda: self._place.remove(name), None)

    def used(self, names: Sequence[bytes]) -> None:
        self._try("written", lambda: self._place.used(names), None)

    def _try(self, how: str, work: Callable[[], T], otherwise: T) -> T:
        if self._rests[how] > time.monotonic():
            return otherwise
        try:
            return work()
        except OSError as error:
            self._rests[how] = time.monotonic() + _TROUBLED
            self.complain(how, f"blocks on {self.label} cannot be {how} for now: {error}")
            return otherwise

    def complain(self, what: str, sentence: str) -> None:
        """Log a sentence, once for each kind of trouble."""
        if what not in self._complained:
            self._complained.add(what)
            _LOG.warning("%s", sentence)
