"""The blocks of a prompt that were found in tiers, until they are in the store."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from polarlm.engine.state.blocks import Blocks, OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.copies import put
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads

_LOG = logging.getLogger(__name__)
_WAITING_BYTES = 1 << 30  # most bytes of blocks that have been read for all requests in the queue together


class Budget:
    """A limit on the bytes of blocks that have been read for requests in the queue."""

    def __init__(self, size: int = _WAITING_BYTES):
        self._left = size
        self._lock = threading.RLock()  # a finalizer may give back while its thread takes

    def take(self, size: int) -> bool:
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


class Claim:
    """Bytes of a budget, which are given back when nobody holds the claim any more, or earlier."""

    def __init__(self, budget: Budget):
        self._budget, taken = budget, list[int]()
        self._taken = taken
        self.give_back = weakref.finalize(self, lambda: budget.give_back(sum(taken)))

    def take(self, size: int) -> bool:
        is_taken = self._budget.take(size)
        if is_taken:
            self._taken.append(size)
        return is_taken

    def replace(self, size: int, actual: int) -> None:
        """Let `size` bytes that were taken become `actual` ones."""
        self._taken.append(actual - size)
        self._budget.give_back(size - actual)


class Stored(NamedTuple):
    """Where blocks are put back to, and how their objects are read."""

    store: KVStore
    prefixes: PrefixCache
    payloads: Payloads


class FoundBlock(NamedTuple):
    """A block of a prompt that was found in a tier. before, key: the hashes before it and at its end; a block with
    fewer than N tokens has no key."""

    before: bytes
    key: bytes | None
    ids: Sequence[int]
    block: Object


class Run(NamedTuple):
    """Consecutive blocks whose objects have equal headers, or a single full-precision block. needed: the groups of
    layers, as bits, in which a later token sees them."""

    blocks: Sequence[FoundBlock]
    needed: int


class TierHit:
    """The blocks of a prompt's prefix that tiers hold and the store lacks."""

    def __init__(
        self,
        stored: Stored,
        claim: Claim,
        root: bytes,
        hashes: Sequence[bytes],
        parts: Sequence[Run],
        spans: Sequence[tuple[int, int, str]],
    ):
        """claim: the bytes of `parts`. root: the hash that the prompt's chain, `hashes`, starts from. parts: in the
        order of the prompt. spans: (first position, end, label of the tier) of each block; tokens that have left all
        windows are counted with the first visible block."""
        self.spans = spans
        self._stored, self._claim, self._root, self._hashes, self._parts = stored, claim, root, hashes, list(parts)

    def put_back(self) -> bool:
        """Copy the next part to the store. Returns whether any are left. The caller holds the engine's lock."""
        if not self._parts:
            return False
        self._keep()
        run = self._parts.pop(0)
        try:
            if not self._adopt(run):
                self._parts.clear()
        except (MemoryError, ValueError) as error:
            _LOG.warning("blocks of a tier do not fit: %s", error)
            self._parts.clear()
        if not self._parts:
            self._claim.give_back()
        return bool(self._parts)

    @property
    def tokens_left(self) -> int:
        """The tokens of the parts that are not in the store yet."""
        return sum(len(run.blocks) for run in self._parts) * self._stored.store.shape.block_size

    def _keep(self) -> None:
        """Let the store reuse the prompt's blocks that it has later than all other free blocks."""
        for key in reversed(self._hashes):
            for group, block in zip(self._stored.store.groups, self._stored.prefixes.quantized(key), strict=True):
                if block is not None:
                    group.quantized.retain(block)
                    group.quantized.release(block)

    def _adopt(self, run: Run) -> bool:
        """Copy to the store the blocks that it lacks: the prefix cache finds them there, and no sequence holds them.
        Returns False, and copies nothing, if there is no room. Raises ValueError for blocks of another format."""
        (store, prefixes, payloads), is_full = self._stored, run.blocks[0].block.is_full
        lacking = []
        for candidate in run.blocks:
            if is_full or candidate.key is None:
                known = prefixes.full(candidate.before, candidate.ids)
            else:
                known = prefixes.quantized(candidate.key)
            if any(block is None and run.needed >> index & 1 for index, block in enumerate(known)):
                lacking.append(candidate)
        allocators = [group.full if is_full else group.quantized for group in store.groups]
        taken: list[Sequence[int | None]] = []
        try:
            for index, allocator in enumerate(allocators):
                allocate = partial(allocator.allocate, len(lacking))
                taken.append(store.with_room(allocate) if run.needed >> index & 1 else [None] * len(lacking))
            blocks: list[Blocks] = [list(ids) for ids in zip(*taken, strict=True)]
            if lacking:
                put(store, payloads, blocks, [candidate.block for candidate in lacking])
            for candidate, ids in zip(lacking, blocks, strict=True):
                if candidate.key is None:
                    prefixes.add_full(candidate.before, candidate.ids, ids)
                else:
                    prefixes.add(self._root, candidate.before, candidate.ids, ids)
        except OutOfBlocks:
            return False
        finally:
            for allocator, allocated in zip(allocators, taken, strict=False):
                for block in reversed(allocated):  # the last ones are reused first: each needs those before it
                    if block is not None:
                        allocator.release(block)
        return True

    def tokens(self, length: int) -> dict[str, int]:
        """Return how many of the first `length` tokens came from each tier, by its label."""
        counts: dict[str, int] = {}
        for start, stop, label in self.spans:
            if start < length:
                counts[label] = counts.get(label, 0) + min(stop, length) - start
        return counts


def cached_from(hit: TierHit | None, cached: int) -> dict[str, int]:
    """Return where `cached` tokens of a prompt came from, see `engine.outputs.Usage`."""
    tiers = {} if hit is None else hit.tokens(cached)
    places = {"store": cached - sum(tiers.values()), **tiers}
    return {place: tokens for place, tokens in places.items() if tokens}
