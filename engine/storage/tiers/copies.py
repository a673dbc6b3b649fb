"""Blocks out of the KV store as payloads of objects, and back. The caller holds the engine's lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks
from polarlm.engine.state.layer_state import LayerState
from polarlm.engine.state.prefix import Blocks, PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.tiers.objects import Part, Payloads


def groups_of(blocks: Blocks) -> int:
    """The groups of layers that have a block, as bits."""
    return sum(1 << index for index, block in enumerate(blocks) if block is not None)


def take_blocks(store: KVStore, payloads: Payloads, blocks: Sequence[Blocks]) -> np.ndarray:
    """The payloads of quantized blocks, uint8 (B, bytes). All have blocks of the same groups, and of one or more."""
    parts, size = payloads.of_blocks(store.ops.stored_as, groups_of(blocks[0]))
    rows = np.zeros((len(blocks), size), np.uint8)
    arrays: dict[tuple[int, str], np.ndarray] = {}
    for group, ids in _by_group(store, blocks):
        arrays |= group.read_blocks(ids)
    for part in parts:
        part.of_rows(rows)[...] = arrays[part.layer, part.name]
    return rows


def _by_group(store: KVStore, blocks: Sequence[Blocks]) -> Iterator[tuple[LayerState, list[int]]]:
    """Each group that has some of these blocks, and their ids there."""
    for index, group in enumerate(store.groups):
        if ids := [block for known in blocks if (block := known[index]) is not None]:
            yield group, ids


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
    for group, ids in _by_group(store, blocks):
        own = (part for part in parts if part.layer in group.layers)
        group.write_blocks(ids, {(part.layer, part.name): part.of_payloads(given) for part in own})


def take_full(store: KVStore, payloads: Payloads, slots: Blocks, ids: Sequence[int]) -> tuple[np.ndarray, np.dtype]:
    """The payload of a block in full precision with `ids`, uint8 (1, bytes), and the type of its numbers."""
    given: dict[tuple[int, str], np.ndarray] = {}
    for group, (slot,) in _by_group(store, [slots]):
        given |= group.read_full(slot, len(ids))
    kv = (array for (layer, _), array in given.items() if layer in store.shape.kv_layers)
    number_type = next((array.dtype for array in kv), np.dtype(np.float16))
    parts, size = payloads.of_full(number_type, len(ids), groups_of(slots))
    rows = np.zeros((1, size), np.uint8)
    rows[0, : 4 * len(ids)] = np.asarray(ids, "<i4").view(np.uint8)
    for part in parts:
        part.of_rows(rows)[0] = given[part.layer, part.name]
    return rows, number_type


def put_full(store: KVStore, parts: Sequence[Part], slots: Blocks, rows: np.ndarray) -> None:
    """Write the payload (1, bytes) of a block in full precision to slots; not to those that are None."""
    for group, (slot,) in _by_group(store, [slots]):
        own = (part for part in parts if part.layer in group.layers)
        group.write_full(slot, {(part.layer, part.name): part.of_rows(rows)[0] for part in own})


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
