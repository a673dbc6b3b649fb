"""Blocks out of the KV store as payloads of objects, and back. The caller holds the engine's lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.kv.blocks import BlockAllocator, OutOfBlocks
from polarlm.engine.kv.prefix import Blocks, PrefixCache
from polarlm.engine.kv.store import KVStore
from polarlm.engine.storage.tiers.objects import Part, Payloads


def groups_of(blocks: Blocks) -> int:
    """The groups of layers that have a block, as bits."""
    return sum(1 << index for index, block in enumerate(blocks) if block is not None)


def take_blocks(store: KVStore, payloads: Payloads, blocks: Sequence[Blocks]) -> np.ndarray:
    """The payloads of quantized blocks, uint8 (B, bytes). All have blocks of the same groups, and of one or more."""
    parts, size = payloads.of_blocks(store.ops.stored_as, groups_of(blocks[0]))
    rows = np.zeros((len(blocks), size), np.uint8)
    heads_first = store.ops.stored_as == transfer.FIELDS
    for layer, own in groupby(parts, lambda part: part.layer):
        group = store.group_of(layer)
        ids = [block for known in blocks if (block := known[group]) is not None]
        arrays = store.ops.read_blocks(store.cache(layer), ids)
        for part in own:
            array = arrays[part.name]
            part.of_rows(rows)[...] = array.swapaxes(0, 1) if heads_first else array
    return rows


def put_blocks(
    store: KVStore,
    payloads: Payloads,
    blocks: Sequence[Blocks],
    stored_as: str,
    given: Sequence[np.ndarray],
    groups: int,
) -> None:
    """Write payloads, each (bytes,), of `groups` to quantized blocks; not to those that are None."""
    parts, _ = payloads.of_blocks(stored_as, groups)
    heads_first = stored_as == transfer.FIELDS
    for layer, own in groupby(parts, lambda part: part.layer):
        ids = [block for known in blocks if (block := known[store.group_of(layer)]) is not None]
        if ids:
            arrays = {part.name: part.of_payloads(given) for part in own}
            if heads_first:
                arrays = {name: array.swapaxes(0, 1) for name, array in arrays.items()}
            store.ops.write_blocks(store.cache(layer), ids, arrays)


def take_full(store: KVStore, payloads: Payloads, slots: Blocks, ids: Sequence[int]) -> tuple[np.ndarray, np.dtype]:
    """The payload of a block in full precision with `ids`, uint8 (1, bytes), and the type of its numbers."""
    given: dict[tuple[int, str], np.ndarray] = {}
    for index, (_, layers) in enumerate(store.shape.groups):
        slot = slots[index]
        if slot is not None:
            for layer in layers:
                given[layer, "k"], given[layer, "v"] = store.ops.read_full(store.cache(layer), slot, len(ids))
    number_type = next(iter(given.values())).dtype
    parts, size = payloads.of_full(number_type, len(ids), groups_of(slots))
    rows = np.zeros((1, size), np.uint8)
    rows[0, : 4 * len(ids)] = np.asarray(ids, "<i4").view(np.uint8)
    for part in parts:
        part.of_rows(rows)[0] = given[part.layer, part.name]
    return rows, number_type


def put_full(store: KVStore, parts: Sequence[Part], slots: Blocks, rows: np.ndarray) -> None:
    """Write the payload (1, bytes) of a block in full precision to slots; not to those that are None."""
    for layer, own in groupby(parts, lambda part: part.layer):
        slot = slots[store.group_of(layer)]
        if slot is not None:
            k, v = (part.of_rows(rows)[0] for part in own)
            store.ops.write_full(store.cache(layer), slot, k, v)


@dataclass(frozen=True)
class Run:
    """Consecutive complete blocks of a prompt that were found in a place, quantized.

    before: the hash before the first of them. ids: the tokens of each. groups: of layers that their payloads have, as
    bits. needed: those of them in which a later token sees these blocks. given: the payloads, each uint8 (bytes,).
    """

    before: bytes
    hashes: Sequence[bytes]
    ids: Sequence[Sequence[int]]
    stored_as: str
    groups: int
    needed: int
    given: Sequence[np.ndarray]

    def adopt(self, store: KVStore, prefixes: PrefixCache, payloads: Payloads, root: bytes) -> bool:
        """Put those blocks into the store that it lacks, where the prefix cache finds them and no sequence holds them.

        root: the hash that the prompt's chain starts from. False, and nothing is put there, if there is no room. Raises
        ValueError for payloads of another format.
        """
        lacks = [number for number, key in enumerate(self.hashes) if _lacks(prefixes.quantized(key), self.needed)]
        if not lacks:
            return True
        with _allocated([group.quantized for group in store.groups], self.needed, len(lacks)) as blocks:
            if blocks is None:
                return False
            given = [self.given[number] for number in lacks]
            put_blocks(store, payloads, blocks, self.stored_as, given, self.groups)
            for number, own in zip(lacks, blocks, strict=True):
                before = self.hashes[number - 1] if number else self.before
                prefixes.add(root, before, self.ids[number], own)
        return True


@dataclass(frozen=True)
class FullBlock:
    """A block in full precision that was found in a place: the first of a prompt, or one with fewer than N tokens.

    groups, needed: as of a `Run`. rows: its payload, uint8 (1, bytes).
    """

    before: bytes
    ids: Sequence[int]
    number_type: np.dtype
    groups: int
    needed: int
    rows: np.ndarray

    def adopt(self, store: KVStore, prefixes: PrefixCache, payloads: Payloads, root: bytes) -> bool:
        """As `Run.adopt`."""
        if not _lacks(prefixes.full(self.before, self.ids), self.needed):
            return True
        with _allocated([group.full for group in store.groups], self.needed, 1) as slots:
            if slots is None:
                return False
            parts, _ = payloads.of_full(self.number_type, len(self.ids), self.groups)
            put_full(store, parts, slots[0], self.rows)
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
