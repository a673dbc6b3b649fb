"""Copies blocks of the KV store to objects, and back. The caller holds the engine's lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np

from polarlm.engine.state.blocks import Blocks
from polarlm.engine.state.layer_state import LayerState
from polarlm.engine.state.requantize.blocks import MixedPrecisionBlocks
from polarlm.engine.state.store import KVStore, SequenceKV
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads


def group_bits(blocks: Blocks) -> int:
    """Return the groups of layers that have a block, as bits."""
    return sum(1 << index for index, block in enumerate(blocks) if block is not None)


def select_groups(blocks: Blocks, groups: int) -> Blocks:
    """Return the blocks of these groups, given as bits, and None for the others."""
    return [block if groups >> index & 1 else None for index, block in enumerate(blocks)]


def take_blocks(store: KVStore, payloads: Payloads, blocks: Sequence[Blocks]) -> list[Object]:
    """Return copies of quantized blocks, which must all be in the same groups."""
    objects: list[Object] = []
    for are_high_precision, run in groupby(blocks, partial(_is_high_precision, store)):
        objects += _take_kind(store, payloads, list(run), are_high_precision)
    return objects


def _is_high_precision(store: KVStore, blocks: Blocks) -> bool:
    group = store.mixed_precision
    block = None if group is None else blocks[store.groups.index(group)]
    return group is not None and block is not None and group.is_high_precision(block)


def _take_kind(store: KVStore, payloads: Payloads, blocks: Sequence[Blocks], are_high_precision: bool) -> list[Object]:
    # Objects are named by the kind's old name, which files have.
    kind, layout = ("finer", payloads.high_precision) if are_high_precision else ("block", payloads)
    header = {"kind": kind, "stored_as": store.ops.stored_as, "groups": group_bits(blocks[0])}
    parts, size = layout.quantized_parts(store.ops.stored_as, group_bits(blocks[0]))
    rows = np.zeros((len(blocks), size), np.uint8)
    arrays: dict[tuple[int, str], np.ndarray] = {}
    for group, ids in _blocks_by_group(store, blocks):
        arrays |= group.read_blocks(ids)
    for part in parts:
        part.view_rows(rows)[...] = arrays[part.layer, part.name]
    return [Object(header, row) for row in rows]


def take_full(store: KVStore, payloads: Payloads, slots: Blocks, ids: Sequence[int]) -> Object:
    """Return a copy of the full-precision block with the tokens `ids`."""
    arrays: dict[tuple[int, str], np.ndarray] = {}
    for group, (slot,) in _blocks_by_group(store, [slots]):
        arrays |= group.read_full(slot, len(ids))
    parts, size = payloads.full_parts(len(ids), group_bits(slots))
    rows = np.zeros((1, size), np.uint8)
    for part in parts:
        part.view_rows(rows)[0] = arrays[part.layer, part.name]
    return Object({"kind": "full", "groups": group_bits(slots), "ids": [int(i) for i in ids]}, rows[0])


def write_objects(store: KVStore, payloads: Payloads, blocks: Sequence[Blocks], objects: Sequence[Object]) -> None:
    """Write objects with equal headers to quantized blocks, or one object to full-precision slots, except to None.
    Raises ValueError if an object does not fit."""
    parts = payloads.parts(objects[0])
    for group, ids in _blocks_by_group(store, blocks):
        arrays = {(part.layer, part.name): part.stack(objects) for part in parts if part.layer in group.layers}
        if objects[0].is_full:
            (slot,) = ids
            group.write_full(slot, {key: array[0] for key, array in arrays.items()})
        elif objects[0].is_high_precision and isinstance(group, MixedPrecisionBlocks):
            group.write_high_precision(ids, arrays)
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

    blocks: number of a block → its object. The first block and an incomplete last one are in full precision. After a
    complete last one, a block without tokens may follow, with the state of recurrent layers. Blocks that have left
    every window are missing.
    """

    length: int
    blocks: Mapping[int, Object]

    @property
    def bytes(self) -> int:
        return sum(len(block.payload) for block in self.blocks.values())


def export(store: KVStore, sequence: SequenceKV, ids: Sequence[int]) -> Snapshot:
    """Return a copy of everything that the store holds of a sequence, whose tokens are the first of `ids`."""
    payloads, n, places = Payloads(store.shape), store.shape.block_size, _sequence_blocks(store, sequence)
    complete, blocks = sequence.length // n, {}
    for number in {0, complete} & set(range(len(places))):
        if group_bits(places[number]):
            tokens = ids[number * n : min(sequence.length, (number + 1) * n)]
            blocks[number] = take_full(store, payloads, places[number], tokens)
    for groups, members in groupby(range(1, complete), lambda number: group_bits(places[number])):
        if groups:
            numbers = list(members)
            objects = take_blocks(store, payloads, [places[number] for number in numbers])
            blocks |= dict(zip(numbers, objects, strict=True))
    return Snapshot(sequence.length, blocks)


def restore(store: KVStore, snapshot: Snapshot) -> SequenceKV:
    """Return a new sequence with the state of a snapshot. Raises OutOfBlocks, or ValueError for a snapshot that does
    not fit this store; then nothing has changed."""
    payloads, n = Payloads(store.shape), store.shape.block_size
    complete = snapshot.length // n
    groups = {number: block.groups for number, block in snapshot.blocks.items()}
    sequence = SequenceKV(snapshot.length, [])
    try:
        for index, group in enumerate(store.groups):
            whole = {number for number in range(complete) if groups.get(number, 0) >> index & 1}
            dropped = max(0, complete - 1) - len(whole - {0})
            reserve = partial(group.reserve_table, snapshot.length, dropped, 0 in whole)
            sequence.tables.append(store.with_room(reserve))
        places = _sequence_blocks(store, sequence)
        if groups != {number: bits for number, blocks in enumerate(places) if (bits := group_bits(blocks))}:
            raise ValueError("the blocks are not those that the next token sees")
        for number in {0, complete} & groups.keys():
            if len(snapshot.blocks[number].ids) != min(n, snapshot.length - number * n):
                raise ValueError(f"block {number} has other tokens")
        for _, members in groupby(sorted(groups), lambda number: snapshot.blocks[number].header):
            numbers = list(members)
            write_objects(
                store, payloads, [places[number] for number in numbers], [snapshot.blocks[number] for number in numbers]
            )
    except BaseException:
        for group, table in zip(store.groups, sequence.tables, strict=False):
            group.release(table)
        raise
    return sequence


def _sequence_blocks(store: KVStore, sequence: SequenceKV) -> list[Blocks]:
    """Return the blocks of a sequence in order, each as its ids in all groups. A sparse group's slot has all that its
    snapshots know: these are left out then."""
    complete, current = sequence.length // store.shape.block_size, [table.current for table in sequence.tables]
    tables = [
        None if group.is_sparse and table.current is not None else table
        for group, table in zip(store.groups, sequence.tables, strict=True)
    ]
    blocks: list[Blocks] = [
        [None if table is None else table.block(number) if number else table.sink for table in tables]
        for number in range(complete)
    ]
    return [*blocks, current] if group_bits(current) else blocks
