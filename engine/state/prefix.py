"""Prefix cache: chained hash of token ids → the blocks that hold their K/V.

The hash of a block covers the hash of the block before it and its own token ids. The chain starts from a root: a hash
of everything else that determines the stored K/V (model, codecs, conditioning, calibration, block size) and of the
salt: K/V of equal tokens are shared only under equal salts. A salt is the `cache_salt` of a request, joined with the
adapter that computes its K/V, if there is one. A block can be found while a sequence holds it, and until the allocator
reuses it: the longest free blocks first, first blocks of sequences after current blocks. Both kinds are in full
precision and match in part as well: the tokens in common with a prompt are copied. Recent blocks are found in their
slots; when these are reused, their codes stay.

    kv = prefixes.match_prefix(ids, salt)   the longest stored prefix of `ids`
    prefixes.insert(kv, ids)                after every commit: makes complete blocks findable
    prefixes.release(kv, ids)               at the end: makes the current block findable, too, and releases the blocks
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from polarlm.engine.errors import EngineError
from polarlm.engine.state.blocks import Blocks, OutOfBlocks, add_blocks
from polarlm.engine.state.kv_blocks import KVBlocks
from polarlm.engine.state.layer_state import copy_slots
from polarlm.engine.state.store import KVStore, SequenceKV
from polarlm.model_loaders.recent import Recent

_MOST_RENAMED = 1 << 16
_MARK = "\0"  # begins a salt with an adapter


@dataclass(eq=False)
class _FullBlock:
    """A full-precision block: the hash before it, its token ids (1 to N) and its slots."""

    parent: bytes
    ids: tuple[int, ...]
    slots: Blocks


class ReuseObserver(Protocol):
    """Reads blocks that can be found for the last time. Its methods must not raise."""

    def copy_before_reuse(self, key: bytes, group: int) -> None:
        """The quantized block of `group` that is stored under the hash `key` is about to be allocated again."""

    def copy_full_before_reuse(self, parent: bytes, ids: Sequence[int]) -> None:
        """A slot of the full-precision block with `ids` after the hash `parent` is about to be allocated again."""


class PrefixCache:
    """Finds the blocks of earlier and of running sequences. Unless `enabled`, it finds none."""

    def __init__(
        self, store: KVStore, identity: bytes = b"", *, enabled: bool = True, control_ids: Collection[int] = ()
    ) -> None:
        """identity: describes everything that determines the stored K/V, except token ids. control_ids: those with
        which parts of messages begin and end."""
        self._store = store
        self._root = hashlib.blake2b(identity, digest_size=16).digest()
        self._enabled, self._control_ids = enabled, np.array(sorted(control_ids), np.int64)
        self._quantized_blocks: dict[bytes, Blocks] = {}  # by the hash at the block's end
        self._recent_blocks: dict[bytes, Blocks] = {}  # slots, likewise
        self._full_blocks: dict[bytes, list[_FullBlock]] = {}  # by the hash before the block
        # Further hashes of complete blocks, and of roots → those that they are stored under.
        self._renamed: Recent[bytes, bytes] = Recent(_MOST_RENAMED)
        self._observer: ReuseObserver | None = None

    def observe_reuse(self, observer: ReuseObserver | None) -> None:
        """Let `observer` read blocks before they are allocated again. It is called under the engine's lock."""
        self._observer = observer

    def set_salt(self, kv: SequenceKV, salt: str) -> SequenceKV:
        """Set the root for `salt` on `kv`, none of whose blocks is in the cache yet, and return `kv`."""
        kv.root = self._salted_root(salt)
        return kv

    def _salted_root(self, salt: str) -> bytes:
        """Return the root for `salt`; empty, which means the cache's own root, without a salt."""
        if not salt:
            return b""
        return hashlib.blake2b(salt.encode(errors="surrogatepass"), key=self._root, digest_size=16).digest()

    # -- adding and removing -----------------------------------------------------------------------------------

    def insert(self, kv: SequenceKV, ids: Sequence[int]) -> None:
        """Add the complete blocks of `kv`, whose tokens are ids[:kv.length], to the cache."""
        n, root = self._store.shape.block_size, kv.root or self._root
        while self._enabled and len(kv.hashes) < kv.length // n:
            number = len(kv.hashes)
            blocks = [table.block(number) if number else table.sink for table in kv.tables]
            parent = self._last_hash(root, kv.hashes)
            kv.hashes.append(self.add(root, parent, ids[number * n : (number + 1) * n], blocks))
            if number:
                self._add_recent(kv.hashes[-1], [table.slot(number) for table in kv.tables])
        first_recent = self._first_recent(kv)
        for number in range(kv.coded, min(first_recent, len(kv.hashes))):
            blocks = [table.block(number) for table in kv.tables]
            self._add_quantized(kv.hashes[number], blocks)
            self._drop_recent(kv.hashes[number], blocks)
        kv.coded = max(kv.coded, first_recent)

    def _first_recent(self, kv: SequenceKV) -> int:
        """Return the number of the first recent block in any group that has such; 0 if none has."""
        tables = zip(self._store.groups, kv.tables, strict=True)
        return min((table.first_recent for group, table in tables if group.recent_blocks), default=0)

    def add(self, root: bytes, parent: bytes, ids: Sequence[int], blocks: Blocks) -> bytes:
        """Make a complete block that the caller holds findable, and return its hash. root: the hash that its chain
        starts from. parent: the hash before it, `root` for the first block."""
        key = _hash(parent, ids)
        if parent == root:
            self.add_full(parent, ids, blocks)
        else:
            self._add_quantized(key, blocks)
        return key

    def release(self, kv: SequenceKV, ids: Sequence[int]) -> None:
        """Add the complete blocks and the current block of a sequence, and release it."""
        self.insert(kv, ids)
        start = kv.length - kv.length % self._store.shape.block_size
        if self._enabled and start < kv.length:
            parent = self._last_hash(kv.root, kv.hashes)
            self.add_full(parent, ids[start : kv.length], [table.current for table in kv.tables])
        elif self._enabled and len(kv.hashes) > 1:
            self._keep_end(kv, ids)
        self._store.release(kv)

    def _keep_end(self, kv: SequenceKV, ids: Sequence[int]) -> None:
        """Add what continues a sequence that ends with a complete block, where the blocks of its tokens do not."""
        blocks = [group.keep_end(table, kv.length) for group, table in zip(self._store.groups, kv.tables, strict=True)]
        if blocks != [None] * len(blocks):
            last = ids[kv.length - self._store.shape.block_size : kv.length]
            self.add(kv.root or self._root, kv.hashes[-2], last, blocks)

    def discard(self, kv: SequenceKV) -> None:
        """Release a sequence whose K/V are damaged, and remove every block that it may have shared from the cache."""
        for parent in (self._last_hash(kv.root, ()), *kv.hashes):
            for entry in list(self._full_blocks.get(parent, ())):
                self._drop(entry)
        for key in kv.hashes:
            self._drop_recent(key, self.find_recent(key))
            for index, block in enumerate(self._quantized_blocks.pop(key, ())):
                if block is not None:
                    self._store.groups[index].quantized.drop(block)
        self._store.release(kv)

    def _last_hash(self, root: bytes, hashes: Sequence[bytes]) -> bytes:
        return hashes[-1] if hashes else root or self._root

    def _add_quantized(self, key: bytes, blocks: Blocks) -> None:
        allocators = [group.quantized for group in self._store.groups]
        stored_blocks = self._quantized_blocks.setdefault(key, [None] * len(blocks))
        add_blocks(stored_blocks, blocks, allocators, lambda index: partial(self._forget_quantized, key, index))
        if stored_blocks == [None] * len(blocks):
            del self._quantized_blocks[key]

    def _add_recent(self, key: bytes, slots: Blocks) -> None:
        if slots != [None] * len(slots):
            allocators = [group.full for group in self._store.groups]
            stored_slots = self._recent_blocks.setdefault(key, [None] * len(slots))
            forget = partial(partial, self._forget_recent, key)
            add_blocks(stored_slots, slots, allocators, forget, are_copied=True)

    def _drop_recent(self, key: bytes, blocks: Blocks) -> None:
        """Remove a recent block from the cache, whether or not a sequence holds it, in groups that have one of
        `blocks`."""
        for index, (slot, block) in enumerate(zip(self._recent_blocks.get(key, ()), blocks, strict=False)):
            if slot is not None and block is not None:
                self._store.groups[index].full.drop(slot)
                self._remove_recent(key, index)

    def _remove_recent(self, key: bytes, index: int) -> None:
        slots = self._recent_blocks[key]
        slots[index] = None
        if slots == [None] * len(slots):
            del self._recent_blocks[key]

    def _forget_recent(self, key: bytes, index: int) -> None:
        """Keep the codes of a recent block, whose slot is reused, if there is room for them."""
        with suppress(OutOfBlocks, EngineError):
            self._encode(key, index)
        self._remove_recent(key, index)

    def _encode(self, key: bytes, index: int) -> None:
        """Let a block be found as codes in a group, too, if it is found as a recent one. Raises OutOfBlocks, and
        EngineError for a damaged block."""
        slot, group = self.find_recent(key)[index], self._store.groups[index]
        if slot is not None and self.find_quantized(key)[index] is None:
            assert isinstance(group, KVBlocks)
            block = group.encode_slot(slot)
            self._add_quantized(key, [block if one is group else None for one in self._store.groups])
            group.quantized.release(block)

    def encode(self, key: bytes) -> Blocks:
        """Return the quantized blocks that are stored under a hash. A block that is found as a recent one alone is
        encoded before, if there is room."""
        with suppress(OutOfBlocks, EngineError):
            for index in range(len(self._store.groups)):
                self._encode(key, index)
        return self.find_quantized(key)

    def add_full(self, parent: bytes, ids: Sequence[int], slots: Blocks) -> None:
        """Make the slots of a block with `ids`, which the caller holds, findable."""
        entries, ids = self._full_blocks.setdefault(parent, []), tuple(ids)
        entry = next((one for one in entries if one.ids == ids), None)
        if entry is None:
            entry = _FullBlock(parent, ids, [None] * len(slots))
            entries.append(entry)
        allocators = [group.full for group in self._store.groups]
        add_blocks(
            entry.slots,
            slots,
            allocators,
            lambda index: partial(self._forget_full, entry, index),
            are_first=len(ids) == self._store.shape.block_size,
        )
        self._remove_if_empty(entry)

    def _forget_quantized(self, key: bytes, index: int) -> None:
        if self._observer is not None:
            self._observer.copy_before_reuse(key, index)
        blocks = self._quantized_blocks[key]
        blocks[index] = None
        if blocks == [None] * len(blocks):
            del self._quantized_blocks[key]

    def _forget_full(self, entry: _FullBlock, index: int) -> None:
        if self._observer is not None:
            self._observer.copy_full_before_reuse(entry.parent, entry.ids)
        entry.slots[index] = None
        self._remove_if_empty(entry)

    def _drop(self, entry: _FullBlock) -> None:
        """Remove a full-precision block from the cache, whether or not a sequence holds it."""
        for index, (group, slot) in enumerate(zip(self._store.groups, entry.slots, strict=True)):
            if slot is not None:
                group.full.drop(slot)
                entry.slots[index] = None
        self._remove_if_empty(entry)

    def _remove_if_empty(self, entry: _FullBlock) -> None:
        if entry.slots == [None] * len(entry.slots):
            entries = self._full_blocks[entry.parent]
            entries.remove(entry)
            if not entries:
                del self._full_blocks[entry.parent]

    def rename(self, key: bytes, of: bytes) -> None:
        """Let the complete blocks under the hash `of` be found under `key`, too; for roots, first blocks."""
        stored = (self._quantized_blocks, self._recent_blocks, self._full_blocks)
        self._renamed.put(key, of if any(of in one for one in stored) else self._renamed.get(of) or of)

    # -- finding -----------------------------------------------------------------------------------------------

    def match_prefix(self, ids: Sequence[int], salt: str = "") -> SequenceKV:
        """Return a sequence of the longest prefix of `ids` that is stored under `salt`: complete blocks are shared,
        part of one is copied. Costs the hashes of `ids`, and at most a copy of one block."""
        n, root = self._store.shape.block_size, self._salted_root(salt)
        hashes, blocks = self._stored_blocks(ids, salt)
        runs, reach = self._runs(blocks), 0
        for count in range(len(blocks), -1, -1):
            if not reach and self._is_complete(runs[count], count, count * n, sparse=False):
                reach = count
            partial_block, shared = self._best_match(
                self._last_hash(root, hashes[:count]), ids[count * n : (count + 1) * n]
            )
            for rest in dict.fromkeys((shared, 0)):
                if self._is_complete(runs[count], count, count * n + rest):
                    length, is_whole = count * n + rest, False
                    kv = self._share(blocks[: min(1, count)], hashes[:count], length, root)
                    try:
                        is_whole = kv.length == length and (rest == 0 or self._set_current(kv, partial_block, rest))
                        if is_whole:
                            _remember_branch(kv, reach, n)
                            self._remember_edges(kv, ids)
                            self._store.note_recent(kv)
                            return kv
                    finally:
                        if not is_whole:
                            self._store.release(kv)
        raise AssertionError("the empty prefix always matches")

    def _share(self, first: Sequence[Blocks], hashes: Sequence[bytes], length: int, root: bytes) -> SequenceKV:
        """Return a sequence of stored blocks, without a current one; an empty one if a block between codes that is in
        full precision alone cannot be encoded, or if recent blocks are missing that must be there. first: the first
        block."""
        count, groups, firsts = len(hashes), self._store.groups, list[int]()
        with suppress(OutOfBlocks, EngineError):
            for index, group in enumerate(groups):
                lowest = oldest = max(1, group.first_visible(length))
                if self._store.keeps_recent:  # older ones than its own, which another sequence has, it reads as codes
                    oldest = max(lowest, count - group.recent_blocks)
                first_recent = count
                while first_recent > oldest and self.find_recent(hashes[first_recent - 1])[index] is not None:
                    first_recent -= 1
                if self._store.keeps_recent and first_recent > oldest:
                    return self._store.new_sequence()
                for key in hashes[lowest:first_recent]:
                    self._encode(key, index)
                firsts.append(first_recent)
        blocks, recent = [*first, *map(self.find_quantized, hashes[1:])], [*map(self.find_recent, hashes)]
        codes = [[each[index] for each in blocks[:end]] for index, end in enumerate(firsts)]
        ends = zip(groups, codes, strict=False)
        if len(firsts) < len(groups) or any(None in each[group.first_visible(length) :] for group, each in ends):
            return self._store.new_sequence()
        slots = [
            [slot for each in recent[end:] if (slot := each[index]) is not None] for index, end in enumerate(firsts)
        ]
        tables = [
            group.share(*each, length) for group, each in zip(groups, zip(codes, slots, strict=True), strict=True)
        ]
        kv = SequenceKV(length, tables, list(hashes), root)
        kv.coded = self._first_recent(kv)
        return kv

    def _remember_edges(self, kv: SequenceKV, ids: Sequence[int]) -> None:
        """Note where a later prompt may leave this one, for groups that are not able to continue everywhere."""
        for group, table in zip(self._store.groups, kv.tables, strict=True):
            if group.is_sparse:
                places = np.flatnonzero(np.isin(np.asarray(ids, np.int64), self._control_ids))
                table.edges = np.unique(places // self._store.shape.block_size - 1).tolist()

    def root(self, salt: str) -> bytes:
        """Return the hash before the first block of a sequence with this salt."""
        return self._salted_root(salt) or self._root

    def hashes(self, ids: Sequence[int], salt: str = "") -> tuple[bytes, list[bytes]]:
        """Return the hash before the first block of `ids`, and the hash of each complete block. Reads no state."""
        root = self.root(salt)
        return root, hash_blocks(root, ids, self._store.shape.block_size)

    def find_quantized(self, key: bytes) -> Blocks:
        """Return the quantized blocks that are stored under a hash."""
        return self._find(self._quantized_blocks, key)

    def find_recent(self, key: bytes) -> Blocks:
        """Return the slots of the recent block that is stored under a hash."""
        return self._find(self._recent_blocks, key)

    def _find(self, blocks: Mapping[bytes, Blocks], key: bytes) -> Blocks:
        found = blocks.get(key) or blocks.get(self._renamed.peek(key) or b"")
        return list(found or [None] * len(self._store.groups))

    def find_complete(self, key: bytes) -> Blocks:
        """Return the blocks that are stored under a hash, quantized ones or slots; None for groups without one."""
        blocks = zip(self.find_quantized(key), self.find_recent(key), strict=True)
        return [recent if block is None else block for block, recent in blocks]

    def find_full(self, parent: bytes, ids: Sequence[int]) -> Blocks:
        """Return the slots of the full-precision block with exactly `ids` after the hash `parent`."""
        entries = self._full_blocks.get(parent) or self._full_blocks.get(self._renamed.peek(parent) or b"") or ()
        slots = (list(entry.slots) for entry in entries if entry.ids == tuple(ids))
        return next(slots, [None] * len(self._store.groups))

    def common_length(self, parent: bytes, ids: Sequence[int]) -> int:
        """Return how many of `ids`, which follow the hash `parent`, one full-precision block begins with."""
        return self._best_match(parent, ids)[1]

    def _stored_blocks(self, ids: Sequence[int], salt: str) -> tuple[list[bytes], list[Blocks]]:
        """Return the hashes of the complete blocks of `ids`, and their stored blocks, which are None if not stored."""
        if not self._enabled:
            return [], []
        root, hashes = self.hashes(ids, salt)
        first = [self.find_full(root, ids[: self._store.shape.block_size])] if hashes else []
        return hashes, [*first, *map(self.find_complete, hashes[1:])]

    def _runs(self, stored_blocks: Sequence[Blocks]) -> list[list[int]]:
        """Return, as [i][group], the length of the run of stored blocks that ends with block i − 1."""
        runs = [[0] * len(self._store.groups)]
        for blocks in stored_blocks:
            runs.append([0 if block is None else run + 1 for run, block in zip(runs[-1], blocks, strict=True)])
        return runs

    def _is_complete(self, runs: Sequence[int], count: int, length: int, *, sparse: bool = True) -> bool:
        """Whether every group, or every group that is not sparse, has all of the `count` blocks that the token after
        `length` tokens can see."""
        return all(
            run >= count - group.first_visible(length)
            for run, group in zip(runs, self._store.groups, strict=True)
            if sparse or not group.is_sparse
        )

    def _best_match(self, parent: bytes, ids: Sequence[int]) -> tuple[_FullBlock | None, int]:
        """Return the full-precision block after `parent` that has the longest prefix of `ids`, and its length, < N."""
        entries = self._full_blocks.get(parent, ()) if self._enabled else ()
        n = self._store.shape.block_size
        usable = [entry for entry in entries if None not in entry.slots]
        best = max(usable, key=lambda entry: common_prefix(entry.ids, ids), default=None)
        # N tokens would be a complete block, which is shared or outside the window.
        return best, 0 if best is None else min(common_prefix(best.ids, ids), n - 1)

    def _set_current(self, kv: SequenceKV, entry: _FullBlock | None, count: int) -> bool:
        """Make the first `count` tokens of a full-precision block the current block of `kv`; False if no slot is
        free for a copy."""
        assert entry is not None
        full = [group.full for group in self._store.groups]
        slots = [slot for slot in entry.slots if slot is not None]
        is_free = not any(allocator.references(slot) for allocator, slot in zip(full, slots, strict=True))
        for allocator, slot in zip(full, slots, strict=True):
            allocator.retain(slot)
        if is_free and count == len(entry.ids):  # no other sequence reads it, so no copy is needed
            self._drop(entry)
            _set_current_slots(kv, slots)
            return True
        try:
            copies = copy_slots(self._store.groups, slots, count)
        finally:
            for allocator, slot in zip(full, slots, strict=True):
                allocator.release(slot)
        if copies is not None:
            _set_current_slots(kv, copies)
        return copies is not None


def join_salt(cache_salt: str, adapter: str) -> str:
    """Return the salt for a `cache_salt` and an adapter, which is text without NUL; each may be empty. Without an
    adapter it is the `cache_salt`, unless that begins with NUL. Different pairs have different salts."""
    if not adapter and not cache_salt.startswith(_MARK):
        return cache_salt
    return f"{_MARK}{adapter}{_MARK}{cache_salt}"


def salt_adapter(salt: str) -> str:
    """Return the adapter in a salt that `join_salt` made; empty for none."""
    return salt[1:].partition(_MARK)[0] if salt.startswith(_MARK) else ""


def _remember_branch(kv: SequenceKV, reach: int, block_size: int) -> None:
    """Note where other sequences leave this one, if it has to be computed again up to there for want of a snapshot.
    reach: the complete blocks that all other groups have."""
    if reach * block_size > kv.length:
        for table in kv.tables:
            table.branch = reach - 1


def _set_current_slots(kv: SequenceKV, slots: Sequence[int]) -> None:
    for table, slot in zip(kv.tables, slots, strict=True):
        table.current = slot


def hash_blocks(root: bytes, ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hash of each complete block of `ids`, in a chain that starts from `root`."""
    hashes: list[bytes] = []
    for start in range(0, len(ids) - block_size + 1, block_size):
        hashes.append(_hash(hashes[-1] if hashes else root, ids[start : start + block_size]))
    return hashes


def _hash(parent: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), key=parent, digest_size=16).digest()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
