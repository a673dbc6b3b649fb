"""Reads the blocks that a prefix cache finds, as objects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.copies import group_bits, select_groups, take_blocks, take_full
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads


class StoreAccess(NamedTuple):
    """A store, what finds its blocks, and how they lie in objects."""

    store: KVStore
    prefixes: PrefixCache
    payloads: Payloads

    @classmethod
    def to(cls, store: KVStore, prefixes: PrefixCache) -> StoreAccess:
        return cls(store, prefixes, Payloads(store.shape))


class StoredBlocks:
    """The caller of a method holds the engine's lock."""

    def __init__(self, access: StoreAccess):
        self._store, self._prefixes, self._payloads = access
        self.block_size, self.sparse_groups = self._store.shape.block_size, self._store.sparse_groups
        self.recent_blocks = self._store.shape.recent_blocks

    def read_quantized(self, hashes: Collection[bytes], groups: int) -> list[tuple[bytes, Object]]:
        """Return the blocks of `groups`, given as bits, under these hashes, as far as they are known. Recent blocks are
        encoded for it."""
        candidates = ((key, select_groups(self._prefixes.encode(key), groups)) for key in hashes)
        stored = [(key, ids) for key, ids in candidates if group_bits(ids)]
        blocks: list[tuple[bytes, Object]] = []
        for _, members in groupby(stored, lambda one: group_bits(one[1])):
            keys, ids = zip(*members, strict=True)
            blocks += zip(keys, take_blocks(self._store, self._payloads, ids), strict=True)
        return blocks

    def read_full(self, parent: bytes, ids: Sequence[int]) -> Object | None:
        """Return the full-precision block with exactly `ids` after the hash `parent`; None if it is not known."""
        slots = self._prefixes.find_full(parent, ids)
        return take_full(self._store, self._payloads, slots, ids) if group_bits(slots) else None

    def has_state(self, key: bytes) -> bool:
        """Whether the snapshot of recurrent layers at the end of the block with this hash is known. Needs no lock."""
        return bool(group_bits(self._prefixes.find_quantized(key)) & self.sparse_groups)
