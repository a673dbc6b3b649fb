"""Tiers that raise no errors: after one, reads find nothing or writes do nothing for a while; and a request's query of
all tiers, which ends when it has waited long enough."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread, current_thread
from typing import NamedTuple, TypeVar

from polarlm.engine.outputs import TierStatus
from polarlm.engine.storage.objects import DamagedObject, Object, unpack
from polarlm.engine.storage.tiers.tier_store import TierStore

_LOG = logging.getLogger(__name__)
_SUSPENSION = 30.0  # seconds without reads after a read fails, as of a server that is gone; the same for writes

T = TypeVar("T")


class CircuitBreaker:
    """A tier that raises no OSError. Reads and writes are suspended separately: a full disk can be read."""

    def __init__(self, tier: TierStore):
        self.label = tier.label
        self._tier = tier
        self._suspended_until = {"read": 0.0, "written": 0.0}
        self._errors = {"read": 0, "written": 0}
        self._damaged_count = 0
        self.timeouts = 0

    @property
    def takes_writes(self) -> bool:
        """Whether writes are not suspended after an error."""
        return self._suspended_until["written"] <= time.monotonic()

    def has(self, name: bytes) -> bool:
        return self._try("read", lambda: self._tier.has(name), False)

    def read(self, name: bytes) -> bytes | bytearray | memoryview | None:
        return self._try("read", lambda: self._tier.read(name), None)

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        self._try("written", lambda: self._tier.write(name, header, payload), None)

    def remove(self, name: bytes) -> None:
        self._try("written", lambda: self._tier.remove(name), None)

    def touch(self, names: Sequence[bytes]) -> None:
        self._try("written", lambda: self._tier.touch(names), None)

    def _try(self, how: str, work: Callable[[], T], default: T) -> T:
        if self._suspended_until[how] > time.monotonic():
            return default
        try:
            return work()
        except OSError as error:
            self._suspended_until[how] = time.monotonic() + _SUSPENSION
            self._errors[how] += 1
            if self._errors[how] == 1:
                _LOG.warning("blocks on %s cannot be %s for now: %s", self._tier.place, how, error)
            return default

    def report_damaged(self, name: bytes, error: Exception) -> None:
        """Count a damaged object and remove it. Logs the first ten, then every tenth, from 100 every hundredth, etc."""
        self._damaged_count += 1
        count = self._damaged_count
        if count % 10 ** (len(str(count)) - 1) == 0:
            sentence = "the object %s on %s is damaged and not used (%d of them so far): %s"
            _LOG.warning(sentence, name.hex(), self._tier.place, count, error)
        self.remove(name)

    def status(self) -> TierStatus:
        """Return what the tier holds, and counts of its errors."""
        contents, errors = self._tier.contents, self._errors
        size, objects = (None, None) if contents is None else contents
        return TierStatus(
            self.label, size, objects, self._damaged_count, self.timeouts, errors["read"], errors["written"]
        )


class TierObject(NamedTuple):
    """An object, and the label of the tier that it was read from."""

    block: Object
    label: str


class TierQuery:
    """Looks for objects in tiers, the fastest one first, until the request no longer waits. Any thread may use it."""

    def __init__(self, tiers: Sequence[CircuitBreaker]):
        self._tiers = tiers
        self._waiting: dict[Thread, CircuitBreaker] = {}  # thread → the tier that it waits for
        self._has_ended = Event()

    def is_wanted(self) -> bool:
        """Whether the request still waits."""
        return not self._has_ended.is_set()

    def end(self) -> CircuitBreaker:
        """Let nothing more be read, and return a tier that a thread waits for."""
        self._has_ended.set()
        return next(iter(self._waiting.copy().values()), self._tiers[0])

    def has(self, name: bytes) -> bool:
        """Whether a tier has an object of this name."""
        return any(self._ask(tier, lambda tier: tier.has(name)) for tier in self._tiers)

    def read(self, name: bytes, check: Callable[[Object], object]) -> TierObject | None:
        """Return the object of this name from the first tier that has it undamaged; None if no tier has.

        check: raises DamagedObject for a wrong object. Damaged objects are removed.
        """
        for tier in self._tiers if self.is_wanted() else ():
            content = self._ask(tier, lambda tier: tier.read(name))
            if content is None:
                continue
            try:
                block = unpack(name, content)
                check(block)
                return TierObject(block, tier.label)
            except DamagedObject as error:
                tier.report_damaged(name, error)
        return None

    def _ask(self, tier: CircuitBreaker, question: Callable[[CircuitBreaker], T]) -> T:
        thread = current_thread()
        self._waiting[thread] = tier
        try:
            return question(tier)
        finally:
            del self._waiting[thread]
