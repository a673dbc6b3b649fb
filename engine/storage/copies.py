"""Copies blocks of the KV store to objects, and back. The caller holds the engine's lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from polarlm.engine.state.blocks import Blocks
from polarlm.engine.state.layer_state import LayerState
from polarlm.engine.state.store import KVStore, SequenceKV
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads, join


def group_bits(blocks: Blocks) -> int:
    """Return the groups of layers that have a block, as bits."""
    return sum(1 << index for index, block in enumerate(blocks) if block is not None)


def select_groups(blocks: Blocks, groups: int) -> Blocks:
    """Return the blocks of these groups, given as bits, and None for the others."""
    return [block if groups >> index & 1 else None for index, block in enumerate(blocks)]


def take_blocks(store: KVStore, payloads: Payloads, blocks: Sequence[Blocks]) -> list[Object]:
    """Return copies of quantized blocks, which must all be in the same groups."""
    stored_as, groups = store.ops.stored_as, group_bits(blocks[0])
    arrays: dict[tuple[int, str], np.ndarray] = {}
    for group, ids in _blocks_by_group(store, blocks):
        arrays |= group.read_blocks(ids)
    header = {"kind": "block", "stored_as": stored_as, "groups": groups}
    rows = join(*payloads.quantized_extents(stored_as, groups), arrays, len(blocks))
    return [Object(header, row) for row in rows]


def take_full(store: KVStore, payloads: Payloads, slots: Blocks, ids: Sequence[int]) -> Object:
    """Return a copy of the full-precision block with the tokens `ids`."""
    arrays: dict[tuple[int, str], np.ndarray] = {}
    for group, (slot,) in _blocks_by_group(store, [slots]):
        arrays |= group.read_full(slot, len(ids))
    groups = group_bits(slots)
    (row,) = join(*payloads.full_extents(len(ids), groups), arrays)
    return Object({"kind": "full", "groups": groups, "ids": [int(i) for i in ids]}, row)


def write_objects(store: KVStore, payloads: Payloads, blocks: Sequence[Blocks], objects: Sequence[Object]) -> None:
    """Write objects with equal headers to quantized blocks, or one object to full-precision slots, except to None.
    Raises ValueError if an object does not fit."""
    extents = payloads.extents(objects[0])
    for group, ids in _blocks_by_group(store, blocks):
        arrays = {(one.layer, one.name): one.stack(objects) for one in extents if one.layer in group.layers}
        if objects[0].is_full:
            (slot,) = ids
            group.write_full(slot, {key: array[0] for key, array in arrays.items()})
        else:
            group.write_blocks(ids, arrays)


def _blocks_by_group(store: KVStore, blocks: Sequence[Blocks]) -> Iterator[tuple[LayerState, list[int]]]:
    """Yield each group that has some of these blocks, and their ids there."""
    for index, group in enumerate(store.groups):
        if ids := [block for each in blocks if (block := each[index]) is not None]:
            yield group, ids


@dataclass(frozen=True)
class Snapshot:
    """A copy of what the store holds of a sequence of `length` tokens.

    blocks: number of a block → its objects: one in full precision, or quantized, or both, of different groups. The
    first block and an incomplete last one are in full precision, and so may complete ones before the last. After a
    complete last one, a block without tokens may follow, with the state of recurrent layers. Blocks that have left
    every window are missing.
    """

    length: int
    blocks: Mapping[int, Sequence[Object]]

    @property
    def bytes(self) -> int:
        return sum(len(one.payload) for objects in self.blocks.values() for one in objects)


def export(store: KVStore, sequence: SequenceKV, ids: Sequence[int]) -> Snapshot:
    """Return a copy of everything that the store holds of a sequence, whose tokens are the first of `ids`."""
    payloads, n = Payloads(store.shape), store.shape.block_size
    codes, slots = _sequence_codes(store, sequence), _sequence_slots(store, sequence)
    blocks: dict[int, list[Object]] = {}
    for number, each in slots.items():
        tokens = ids[number * n : min(sequence.length, (number + 1) * n)]
        blocks[number] = [take_full(store, payloads, each, tokens)]
    for _, members in groupby(codes, lambda number: group_bits(codes[number])):
        numbers = list(members)
        objects = take_blocks(store, payloads, [codes[number] for number in numbers])
        for number, one in zip(numbers, objects, strict=True):
            blocks.setdefault(number, []).append(one)
    return Snapshot(sequence.length, blocks)


def restore(store: KVStore, snapshot: Snapshot) -> SequenceKV:
    """Return a new sequence with the state of a snapshot. Raises OutOfBlocks, or ValueError for a snapshot that does
    not fit this store; then nothing has changed."""
    payloads, n = Payloads(store.shape), store.shape.block_size
    complete = snapshot.length // n
    full, codes = (
        {number: one for number, objects in snapshot.blocks.items() for one in objects if one.is_full is is_full}
        for is_full in (True, False)
    )
    sequence = SequenceKV(snapshot.length, [])
    try:
        for index, group in enumerate(store.groups):
            recent, quantized = (
                {number for number, one in kind.items() if number < complete and one.groups >> index & 1}
                for kind in (full, codes)
            )
            dropped = max(0, complete - 1) - len((recent | quantized) - {0})
            reserve = partial(group.reserve_table, snapshot.length, dropped, len(recent - {0}), with_sink=0 in recent)
            sequence.tables.append(store.with_slots(group, reserve))
        for objects, places in ((full, _sequence_slots(store, sequence)), (codes, _sequence_codes(store, sequence))):
            groups = {number: group_bits(blocks) for number, blocks in places.items()}
            if {number: one.groups for number, one in objects.items()} != groups:
                raise ValueError("the blocks are not those that the next token sees")
        for number, one in full.items():
            if len(one.ids) != min(n, snapshot.length - number * n):
                raise ValueError(f"block {number} has other tokens")
        for number, blocks in _sequence_slots(store, sequence).items():
            write_objects(store, payloads, [blocks], [full[number]])
        ids = _sequence_codes(store, sequence)
        for _, members in groupby(sorted(codes), lambda number: codes[number].header):
            numbers = list(members)
            write_objects(store, payloads, [ids[number] for number in numbers], [codes[number] for number in numbers])
    except BaseException:
        for group, table in zip(store.groups, sequence.tables, strict=False):
            group.release(table)
        raise
    store.note_recent(sequence)
    return sequence


def _sequence_codes(store: KVStore, sequence: SequenceKV) -> dict[int, Blocks]:
    """Return the quantized blocks of a sequence by their numbers, each as its ids in all groups. A sparse group's slot
    has all that its snapshots know: these are left out then."""
    tables = [
        None if group.is_sparse and table.current is not None else table
        for group, table in zip(store.groups, sequence.tables, strict=True)
    ]
    numbers = range(1, sequence.length // store.shape.block_size)
    blocks = {number: [None if one is None else one.block(number) for one in tables] for number in numbers}
    return {number: each for number, each in blocks.items() if group_bits(each)}


def _sequence_slots(store: KVStore, sequence: SequenceKV) -> dict[int, Blocks]:
    """Return the slots of a sequence by the numbers of their blocks, each as its ids in all groups."""
    complete = sequence.length // store.shape.block_size
    slots: dict[int, Blocks] = {number: [one.slot(number) for one in sequence.tables] for number in range(complete)}
    slots[complete] = [table.current for table in sequence.tables]
    return {number: each for number, each in slots.items() if group_bits(each)}
