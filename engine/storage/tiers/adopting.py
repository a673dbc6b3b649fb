"""Copies blocks that were found in a tier to the KV store. The caller holds the engine's lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from polarlm.engine.state.blocks import BlockAllocator, Blocks, OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.copies import put
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads


class FoundBlock(NamedTuple):
    """A block of a prompt that was found in a tier.

    before, key: the hashes before it and at its end; a block with fewer than N tokens has no key.
    """

    before: bytes
    key: bytes | None
    ids: Sequence[int]
    block: Object


@dataclass(frozen=True)
class Run:
    """Consecutive blocks whose objects have equal headers, or a single full-precision block.

    needed: the groups of layers, as bits, in which a later token sees them.
    """

    blocks: Sequence[FoundBlock]
    needed: int

    def adopt(self, store: KVStore, prefixes: PrefixCache, payloads: Payloads, root: bytes) -> bool:
        """Copy to the store the blocks that it lacks. The prefix cache finds them there, and no sequence holds them.

        root: the hash that the prompt's chain starts from. Returns False, and copies nothing, if there is no room.
        Raises ValueError for blocks of another format.
        """
        is_full = self.blocks[0].block.is_full
        lacks = []
        for one in self.blocks:
            known = prefixes.full(one.before, one.ids) if is_full or one.key is None else prefixes.quantized(one.key)
            if any(block is None and self.needed >> index & 1 for index, block in enumerate(known)):
                lacks.append(one)
        if not lacks:
            return True
        allocators = [group.full if is_full else group.quantized for group in store.groups]
        with _allocated(store, allocators, self.needed, len(lacks)) as blocks:
            if blocks is None:
                return False
            put(store, payloads, blocks, [one.block for one in lacks])
            for one, own in zip(lacks, blocks, strict=True):
                if one.key is None:
                    prefixes.add_full(one.before, one.ids, own)
                else:
                    prefixes.add(root, one.before, one.ids, own)
        return True


@contextmanager
def _allocated(
    store: KVStore, allocators: Sequence[BlockAllocator], groups: int, count: int
) -> Iterator[list[Blocks] | None]:
    """Allocate `count` blocks in each of these groups until the context ends; yield None if there are too few."""
    taken: list[list[int] | None] = []
    try:
        try:
            for index, allocator in enumerate(allocators):
                own = store.with_room(partial(allocator.allocate, count)) if groups >> index & 1 else None
                taken.append(own)
        except OutOfBlocks:
            yield None
        else:
            yield [[None if own is None else own[number] for own in taken] for number in range(count)]
    finally:
        for allocator, own in zip(allocators, taken, strict=False):
            for block in reversed(own or ()):  # the last ones are reused first: each needs those before it
                allocator.release(block)
