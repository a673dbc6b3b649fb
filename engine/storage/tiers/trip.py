"""What one request asks of tiers, until it has waited long enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread, current_thread
from typing import NamedTuple, TypeVar

from polarlm.engine.storage.objects import DamagedObject, Object, unpack
from polarlm.engine.storage.tiers.circuit_breaker import CircuitBreaker

T = TypeVar("T")


class ReadObject(NamedTuple):
    """An object, and the label of the tier that it was read from."""

    block: Object
    label: str


class Trip:
    """Asks tiers, the fastest one first. Any thread may ask."""

    def __init__(self, tiers: Sequence[CircuitBreaker]):
        self._tiers = tiers
        self._asked: dict[Thread, CircuitBreaker] = {}  # thread → the tier that it waits for
        self._ended = Event()

    def is_wanted(self) -> bool:
        """Whether more may be read."""
        return not self._ended.is_set()

    def end(self) -> CircuitBreaker:
        """Let nothing more be read, and return a tier that a thread waits for."""
        self._ended.set()
        return next(iter(self._asked.copy().values()), self._tiers[0])

    def has(self, name: bytes) -> bool:
        """Whether a tier has an object of this name."""
        return any(self._ask(tier, lambda tier: tier.has(name)) for tier in self._tiers)

    def read(self, name: bytes, check: Callable[[Object], object]) -> ReadObject | None:
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
                return ReadObject(block, tier.label)
            except DamagedObject as error:
                tier.is_damaged(name, error)
        return None

    def _ask(self, tier: CircuitBreaker, question: Callable[[CircuitBreaker], T]) -> T:
        thread = current_thread()
        self._asked[thread] = tier
        try:
            return question(tier)
        finally:
            del self._asked[thread]
