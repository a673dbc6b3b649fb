"""Looks up objects in tiers, and blocks in the store. Needs no lock: what it reads of the store may be out of date, and
is read again when blocks are copied there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread, current_thread

from polarlm.engine.state.blocks import Blocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.objects import DamagedObject, Object, unpack
from polarlm.engine.storage.payloads import Payloads
from polarlm.engine.storage.tiers.circuit_breaker import CircuitBreaker
from polarlm.engine.storage.tiers.tier_hit import Budget


class Lookup:
    """Reads objects from tiers, the fastest one first."""

    def __init__(
        self,
        store: KVStore,
        prefixes: PrefixCache,
        payloads: Payloads,
        tiers: Sequence[CircuitBreaker],
        budget: Budget,
    ):
        self.store, self.prefixes, self.payloads = store, prefixes, payloads
        self.tiers, self.budget = tiers, budget
        self._asked: dict[Thread, CircuitBreaker] = {}  # a thread in `asking` → the tier that it queried last
        self._readers: dict[Thread, Thread] = {}  # a thread that reads for another one → the other one

    @contextmanager
    def asking(self, reads_for: Thread | None = None) -> Iterator[None]:
        """The context in which a thread looks something up, for itself or for another one."""
        thread = current_thread()
        if reads_for is not None:
            self._readers[thread] = reads_for
        try:
            yield
        finally:
            self._asked.pop(thread, None)
            self._readers.pop(thread, None)

    def asked_by(self, thread: Thread) -> CircuitBreaker:
        """Return the tier that a thread waits for, or one that reads for it."""
        readers = [one for one, other in self._readers.copy().items() if other is thread]
        return next((tier for one in (*readers, thread) if (tier := self._asked.get(one))), self.tiers[0])

    def _each(self) -> Iterator[CircuitBreaker]:
        for tier in self.tiers:
            self._asked[current_thread()] = tier
            yield tier

    def lacking(self, ids: Sequence[int], salt: str) -> int:
        """Return how many of `ids` are in no block that the store has."""
        root, hashes = self.prefixes.hashes(ids, salt)
        n, stored = self.store.shape.block_size, 0
        for number in range(len(hashes)):
            stored += n * self.has_dense(self.known(root, hashes, ids, number))
        rest = ids[len(hashes) * n :]
        return len(ids) - stored - (self.prefixes.common(hashes[-1], rest) if hashes and rest else 0)

    def has_dense(self, blocks: Blocks) -> bool:
        """Whether a block is stored in all groups of layers but sparse ones."""
        return all(one is not None or group.is_sparse for one, group in zip(blocks, self.store.groups, strict=True))

    def known(self, root: bytes, hashes: Sequence[bytes], ids: Sequence[int], number: int) -> Blocks:
        """Return the store's blocks of complete block `number`: for each group of layers its id, or None."""
        if number:
            return self.prefixes.quantized(hashes[number])
        return self.prefixes.full(root, ids[: self.store.shape.block_size])

    def has(self, name: bytes) -> bool:
        """Whether a tier has an object of this name."""
        return any(tier.has(name) for tier in self._each())

    def read(self, name: bytes, check: Callable[[Object], object]) -> tuple[Object, str] | None:
        """Return the object of this name, and the label of the first tier that has it undamaged; None if no tier has.

        check: raises DamagedObject for a wrong object. Damaged objects are removed.
        """
        for tier in self._each():
            content = tier.read(name)
            if content is None:
                continue
            try:
                found = unpack(name, content)
                check(found)
                return found, tier.label
            except DamagedObject as error:
                tier.is_damaged(name, error)
        return None
