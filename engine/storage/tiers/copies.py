"""Blocks that were found in a place go to the KV store. The caller holds the engine's lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks
from polarlm.engine.state.prefix import Blocks, PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.copies import put_blocks, put_full
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads


@dataclass(frozen=True)
class Run:
    """Consecutive complete blocks of a prompt that were found in a place, quantized.

    before: the hash before the first of them. ids: the tokens of each. given: the blocks, all of the same header.
    needed: those of their groups of layers, as bits, in which a later token sees these blocks.
    """

    before: bytes
    hashes: Sequence[bytes]
    ids: Sequence[Sequence[int]]
    needed: int
    given: Sequence[Object]

    def adopt(self, store: KVStore, prefixes: PrefixCache, payloads: Payloads, root: bytes) -> bool:
        """Put those blocks into the store that it lacks, where the prefix cache finds them and no sequence holds them.

        root: the hash that the prompt's chain starts from. False, and nothing is put there, if there is no room. Raises
        ValueError for blocks of another format.
        """
        lacks = [number for number, key in enumerate(self.hashes) if _lacks(prefixes.quantized(key), self.needed)]
        if not lacks:
            return True
        with _allocated([group.quantized for group in store.groups], self.needed, len(lacks)) as blocks:
            if blocks is None:
                return False
            put_blocks(store, payloads, blocks, [self.given[number] for number in lacks])
            for number, own in zip(lacks, blocks, strict=True):
                before = self.hashes[number - 1] if number else self.before
                prefixes.add(root, before, self.ids[number], own)
        return True


@dataclass(frozen=True)
class FullBlock:
    """A block in full precision that was found in a place: the first of a prompt, or one with fewer than N tokens.

    needed: as of a `Run`.
    """

    before: bytes
    ids: Sequence[int]
    needed: int
    given: Object

    def adopt(self, store: KVStore, prefixes: PrefixCache, payloads: Payloads, root: bytes) -> bool:
        """As `Run.adopt`."""
        if not _lacks(prefixes.full(self.before, self.ids), self.needed):
            return True
        with _allocated([group.full for group in store.groups], self.needed, 1) as slots:
            if slots is None:
                return False
            put_full(store, payloads, slots[0], self.given)
            if len(self.ids) == store.shape.block_size:
                prefixes.add(root, self.before, self.ids, slots[0])
            else:
                prefixes.add_full(self.before, self.ids, slots[0])
        return True


def _lacks(known: Blocks, needed: int) -> bool:
    return any(block is None and needed >> index & 1 for index, block in enumerate(known))


@contextmanager
def _allocated(allocators: Sequence[BlockAllocator], groups: int, count: int) -> Iterator[list[Blocks] | None]:
    """`count` blocks of each of these groups, held to the end of the context; None if there are not so many."""
    taken: list[list[int] | None] = []
    try:
        try:
            for index, allocator in enumerate(allocators):
                taken.append(allocator.allocate(count) if groups >> index & 1 else None)
        except OutOfBlocks:
            yield None
        else:
            yield [[None if own is None else own[number] for own in taken] for number in range(count)]
    finally:
        for allocator, own in zip(allocators, taken, strict=False):
            for block in reversed(own or ()):  # the last ones are of no use without those before them
                allocator.release(block)
