"""What a request, or a turn of the writer, asks of tiers, and what has gone wrong with each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Event, Thread, current_thread
from typing import NamedTuple, TypeVar

from polarlm.engine.outputs import TierStatus
from polarlm.engine.storage.objects import DamagedObject, Object, unpack
from polarlm.engine.storage.tiers.tier_store import TierStore

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Tier:
    """A tier, and counts of what has gone wrong with it."""

    def __init__(self, store: TierStore):
        self.store = store
        self._errors = {"read": 0, "written": 0}
        self._damaged_count = self._timeouts = 0

    def report_error(self, how: str, error: OSError) -> None:
        """Count an error, and log the first one. how: what its blocks cannot be, "read" or "written"."""
        is_first = not self._errors[how]
        self._errors[how] += 1
        if is_first:
            _LOG.warning("blocks on %s cannot be %s for now: %s", self.store.place, how, error)

    def report_timeout(self, seconds: float) -> None:
        """Count a request that waited for so long in vain, and log the first one."""
        self._timeouts += 1
        if self._timeouts == 1:
            sentence = "kept blocks on %s were not read within %.1f s: prompts are computed without them for now"
            _LOG.warning(sentence, self.store.label, seconds)

    def report_damaged(self, name: bytes, error: Exception) -> None:
        """Count a damaged object. Logs the first ten, then every tenth, from 100 every hundredth, etc."""
        self._damaged_count += 1
        count = self._damaged_count
        if count % 10 ** (len(str(count)) - 1) == 0:
            sentence = "the object %s on %s is damaged and not used (%d of them so far): %s"
            _LOG.warning(sentence, name.hex(), self.store.place, count, error)

    def status(self) -> TierStatus:
        """Return what the tier holds, and counts of its errors."""
        contents, errors = self.store.contents, self._errors
        size, objects = (None, None) if contents is None else contents
        return TierStatus(
            self.store.label, size, objects, self._damaged_count, self._timeouts, errors["read"], errors["written"]
        )


class TierObject(NamedTuple):
    """An object, and the label of the tier that it was read from."""

    block: Object
    label: str


class TierQuery:
    """Asks tiers, the fastest one first, until the request no longer waits; then nothing is there. A tier that fails is
    not asked again by the same query. Any thread may use it; no method raises OSError."""

    def __init__(self, tiers: Sequence[Tier]):
        self._tiers = tiers
        self._failed: set[Tier] = set()
        self._lacking: dict[bytes, list[Tier]] = {}  # name → the tiers that lack its object, as far as it was asked for
        self._waiting: dict[Thread, Tier] = {}  # thread → the tier that it waits for
        self._has_ended = Event()

    @property
    def readers(self) -> int:
        """How many threads may read at a time."""
        return max(tier.store.readers for tier in self._tiers)

    def end(self) -> Tier:
        """Let nothing more be asked, and return a tier that a thread waits for."""
        self._has_ended.set()
        return next(iter(self._waiting.copy().values()), self._tiers[0])

    def has(self, name: bytes) -> bool:
        """Whether a tier has an object of this name."""
        return any(self._ask(tier, "read", lambda store: store.has(name), False) for tier in self._tiers)

    def read(self, name: bytes, check: Callable[[Object], object]) -> TierObject | None:
        """Return the object of this name from the first tier that has it undamaged; None if no tier has.

        check: raises DamagedObject for a wrong object. Damaged objects are removed.
        """
        for tier in self._tiers:
            content = self._ask(tier, "read", lambda store: store.read(name), None)
            if content is None:
                continue
            try:
                block = unpack(name, content)
                check(block)
                return TierObject(block, tier.store.label)
            except DamagedObject as error:
                tier.report_damaged(name, error)
                self._ask(tier, "written", lambda store: store.remove(name), None)
        return None

    def is_lacking(self, name: bytes) -> bool:
        """Whether a tier lacks the object of this name."""
        lacking = [tier for tier in self._tiers if not self._ask(tier, "read", lambda store: store.has(name), True)]
        self._lacking[name] = lacking
        return bool(lacking)

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        """Write an object to the tiers that lack it, or to all if `is_lacking` was not asked: it replaces others."""
        for tier in self._lacking.get(name, self._tiers):
            self._ask(tier, "written", lambda store: store.write(name, header, payload), None)

    def touch(self, names: Sequence[bytes], seconds: int) -> None:
        """Record that these objects were used, for some so many seconds later. The first ones are to stay longest."""
        for tier in self._tiers:
            self._ask(tier, "written", lambda store: store.touch(names, seconds), None)

    def _ask(self, tier: Tier, how: str, question: Callable[[TierStore], T], default: T) -> T:
        """Return the answer of a tier; `default` if it fails or has failed, or the request no longer waits."""
        if tier in self._failed or self._has_ended.is_set():
            return default
        thread = current_thread()
        self._waiting[thread] = tier
        try:
            return question(tier.store)
        except OSError as error:
            self._failed.add(tier)
            tier.report_error(how, error)
            return default
        finally:
            del self._waiting[thread]
