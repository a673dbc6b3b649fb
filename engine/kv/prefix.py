"""What the store still knows: complete blocks by the hash of every token up to their end, found again by any prompt.

The hash of a block is chained: of the hash before it and of its own token ids, from a root that stands for whatever
else decides what is stored (model, codecs, conditioning, calibration, block size), and for a salt, which keeps apart
what is the same otherwise. A block is found as long as its contents last: while a sequence holds it, and from then on
until the allocator hands it out for something else, the one that has been free the longest first. Full blocks (the
first of a sequence, and its current block) can be used in part: of them, as many tokens are copied as a prompt has in
common with them.

    kv = prefixes.match_prefix(ids, salt)   the longest beginning of `ids` that is there
    prefixes.insert(kv, ids)         after every commit: complete blocks can be found from now on
    prefixes.release(kv, ids)         the sequence ends: its current block can be found, too
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.backends.ops import Place
from engine.kv.blocks import BlockAllocator, OutOfBlocks
from engine.kv.store import KVStore, SequenceKV

Blocks = list[int | None]  # one per group of layers; None: not there any more, or never was


@dataclass(eq=False)
class _Full:
    """A full-precision block behind the tokens of `before`: its ids (1 to N of them) and its slots."""

    before: bytes
    ids: tuple[int, ...]
    slots: Blocks


class PrefixCache:
    """Finds stored tokens of earlier and of present sequences. Without `enabled` it finds nothing."""

    def __init__(self, store: KVStore, identity: bytes = b"", *, enabled: bool = True):
        """identity: of all that decides what is stored for given token ids."""
        self._store = store
        self._root = hashlib.blake2b(identity, digest_size=16).digest()
        self._enabled = enabled
        self._quantized: dict[bytes, Blocks] = {}  # by the hash at the block's end
        self._exact: dict[bytes, list[_Full]] = {}  # by the hash before them

    def salted(self, kv: SequenceKV, salt: str) -> SequenceKV:
        """A sequence that nobody can find yet, to be found with `salt`."""
        kv.root = self._salted_root(salt)
        return kv

    def _salted_root(self, salt: str) -> bytes:
        """What the hashes of a sequence begin with; empty for no salt, which stands for the usual beginning."""
        if not salt:
            return b""
        return hashlib.blake2b(salt.encode(errors="surrogatepass"), key=self._root, digest_size=16).digest()

    # -- what can be found -------------------------------------------------------------------------------------

    def insert(self, kv: SequenceKV, ids: Sequence[int]) -> None:
        """Let the complete blocks of a sequence, whose first kv.length tokens are those of `ids`, be found."""
        n = self._store.shape.block_size
        while self._enabled and len(kv.hashes) < kv.length // n:
            number, before = len(kv.hashes), self._before(kv.root, kv.hashes)
            own = ids[number * n : (number + 1) * n]
            kv.hashes.append(_hash(before, own))
            if number == 0:
                self._add_full(before, own, [table.sink for table in kv.tables])
            else:
                self._add_quantized(kv.hashes[-1], [table.block(number) for table in kv.tables])

    def release(self, kv: SequenceKV, ids: Sequence[int]) -> None:
        """`insert`, the current block as well, and give up the sequence."""
        self.insert(kv, ids)
        start = kv.length - kv.length % self._store.shape.block_size
        if self._enabled and start < kv.length:
            before = self._before(kv.root, kv.hashes)
            self._add_full(before, ids[start : kv.length], [table.current for table in kv.tables])
        self._store.release(kv)

    def discard(self, kv: SequenceKV) -> None:
        """Give up a sequence whose numbers are damaged: nothing that it may have shared is found again."""
        for before in (self._before(kv.root, ()), *kv.hashes):
            for entry in list(self._exact.get(before, ())):
                self._drop(entry)
        for key in kv.hashes:
            for group, block in zip(self._store.groups, self._quantized.pop(key, ()), strict=False):
                if block is not None:
                    group.quantized.drop(block)
        self._store.release(kv)

    def _before(self, root: bytes, hashes: Sequence[bytes]) -> bytes:
        """The hash behind which the next block stands."""
        return hashes[-1] if hashes else root or self._root

    def _add_quantized(self, key: bytes, blocks: Blocks) -> None:
        allocators = [group.quantized for group in self._store.groups]
        known = self._quantized.setdefault(key, [None] * len(blocks))
        _fill(known, blocks, allocators, lambda index: partial(self._forget_quantized, key, index))
        if known == [None] * len(blocks):
            del self._quantized[key]

    def _add_full(self, before: bytes, ids: Sequence[int], slots: Blocks) -> None:
        entries, ids = self._exact.setdefault(before, []), tuple(ids)
        known = next((entry for entry in entries if entry.ids == ids), None)
        if known is None:
            known = _Full(before, ids, [None] * len(slots))
            entries.append(known)
        allocators = [group.full for group in self._store.groups]
        _fill(known.slots, slots, allocators, lambda index: partial(self._forget_full, known, index))
        self._discard_if_empty(known)

    def _forget_quantized(self, key: bytes, index: int) -> None:
        blocks = self._quantized[key]
        blocks[index] = None
        if blocks == [None] * len(blocks):
            del self._quantized[key]

    def _forget_full(self, entry: _Full, index: int) -> None:
        entry.slots[index] = None
        self._discard_if_empty(entry)

    def _drop(self, entry: _Full) -> None:
        """A full-precision block cannot be found any more, whoever holds it."""
        for index, (group, slot) in enumerate(zip(self._store.groups, entry.slots, strict=True)):
            if slot is not None:
                group.full.drop(slot)
                entry.slots[index] = None
        self._discard_if_empty(entry)

    def _discard_if_empty(self, entry: _Full) -> None:
        if entry.slots == [None] * len(entry.slots):
            entries = self._exact[entry.before]
            entries.remove(entry)
            if not entries:
                del self._exact[entry.before]

    # -- finding -----------------------------------------------------------------------------------------------

    def match_prefix(self, ids: Sequence[int], salt: str = "") -> SequenceKV:
        """A sequence of as many of the first tokens of `ids` as are stored: complete blocks are shared, a part copied.

        salt: what was stored under another one is not found.

        Costs a hash of `ids` and the copy of a block at most.
        """
        n, root = self._store.shape.block_size, self._salted_root(salt)
        hashes, known = self._known(ids, root)
        there = self._there(known)
        for count in range(len(known), -1, -1):
            current, common = self._tail(self._before(root, hashes[:count]), ids[count * n : (count + 1) * n])
            for rest in dict.fromkeys((common, 0)):
                if self._is_seen(there[count], count, count * n + rest):
                    kv, found = self._share(known[:count], hashes[:count], count * n + rest, root), False
                    try:
                        found = rest == 0 or self._take(kv, current, rest)
                        if found:
                            return kv
                    finally:
                        if not found:
                            self._store.release(kv)
        raise AssertionError("nothing can always be shared")

    def _known(self, ids: Sequence[int], root: bytes) -> tuple[list[bytes], list[Blocks]]:
        """Hash and blocks of every complete block of `ids`, found or not."""
        n = self._store.shape.block_size
        nothing: Blocks = [None] * len(self._store.groups)
        hashes: list[bytes] = []
        known: list[Blocks] = []
        for start in range(0, len(ids) - n + 1 if self._enabled else 0, n):
            before, own = self._before(root, hashes), ids[start : start + n]
            hashes.append(_hash(before, own))
            if start:
                known.append(self._quantized.get(hashes[-1], nothing))
            else:
                first = (entry.slots for entry in self._exact.get(before, ()) if entry.ids == tuple(own))
                known.append(next(first, nothing))
        return hashes, known

    def _there(self, known: Sequence[Blocks]) -> list[list[int]]:
        """[i][group]: how many of the first i blocks lie side by side up to the last of them."""
        there = [[0] * len(self._store.groups)]
        for blocks in known:
            there.append([0 if block is None else run + 1 for run, block in zip(there[-1], blocks, strict=True)])
        return there

    def _is_seen(self, there: Sequence[int], count: int, length: int) -> bool:
        """Whether every group has, of `count` complete blocks, all that the token behind `length` tokens can see."""
        groups = self._store.groups
        return all(run >= count - group.first_visible(length) for run, group in zip(there, groups, strict=True))

    def _share(self, known: Sequence[Blocks], hashes: list[bytes], length: int, root: bytes) -> SequenceKV:
        groups = enumerate(self._store.groups)
        tables = [group.share([blocks[index] for blocks in known], length) for index, group in groups]
        return SequenceKV(length, tables, hashes, root)

    def _tail(self, before: bytes, ids: Sequence[int]) -> tuple[_Full | None, int]:
        """The full-precision block behind `before` that has most of its tokens in common with `ids`, and how many."""
        entries = self._exact.get(before, ()) if self._enabled else ()
        whole = [entry for entry in entries if None not in entry.slots]
        best = max(whole, key=lambda entry: _common(entry.ids, ids), default=None)
        # Whole blocks are shared, or out of sight.
        return best, 0 if best is None else min(_common(best.ids, ids), self._store.shape.block_size - 1)

    def _take(self, kv: SequenceKV, current: _Full | None, count: int) -> bool:
        """Give a sequence its current block: the first `count` tokens of a full-precision block. False where there is
        no room for it."""
        assert current is not None
        full = [group.full for group in self._store.groups]
        slots = [slot for slot in current.slots if slot is not None]
        is_free = not any(allocator.references(slot) for allocator, slot in zip(full, slots, strict=True))
        for allocator, slot in zip(full, slots, strict=True):
            allocator.retain(slot)
        if is_free and count == len(current.ids):  # nobody else is about to add to it
            self._drop(current)
            _set_tails(kv, slots)
            return True
        try:
            copies = self._copies(slots, count)
        finally:
            for allocator, slot in zip(full, slots, strict=True):
                allocator.release(slot)
        if copies is not None:
            _set_tails(kv, copies)
        return copies is not None

    def _copies(self, slots: Sequence[int], count: int) -> list[int] | None:
        """Slots of each group that hold the first `count` tokens of those in `slots`; None where there is no room."""
        full = [group.full for group in self._store.groups]
        copies = _allocate_each(full)
        if copies is None:
            return None
        try:
            for layer in range(len(self._store.shape.layers)):
                index = self._store.group_of(layer)
                places = Place(None, copies[index]), Place(None, slots[index])
                self._store.ops.copy_full(self._store.cache(layer), *places, count)
        except BaseException:
            for allocator, slot in zip(full, copies, strict=True):
                allocator.release(slot)
            raise
        return copies


def _set_tails(kv: SequenceKV, slots: Sequence[int]) -> None:
    for table, slot in zip(kv.tables, slots, strict=True):
        table.current = slot


def _fill(
    known: Blocks, blocks: Blocks, allocators: Sequence[BlockAllocator], forget: Callable[[int], Callable[[], None]]
) -> None:
    """Let `blocks` be found where nothing is known, or something that nobody holds any more and that is older."""
    for index, (allocator, block) in enumerate(zip(allocators, blocks, strict=True)):
        old = known[index]
        if block is None or (old is not None and allocator.references(old)):
            continue
        if old is not None:
            allocator.drop(old)
        known[index] = block
        allocator.keep(block, forget(index))


def _allocate_each(allocators: Sequence[BlockAllocator]) -> list[int] | None:
    """A block of each, or of none."""
    taken: list[int] = []
    try:
        for allocator in allocators:
            taken += allocator.allocate(1)
    except OutOfBlocks:
        for allocator, block in zip(allocators, taken, strict=False):
            allocator.release(block)
        return None
    return taken


def _hash(before: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), key=before, digest_size=16).digest()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
