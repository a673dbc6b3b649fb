"""Snapshots: copies on the host of everything that the store holds of a sequence, and their way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.kv.blocks import OutOfBlocks
from polarlm.engine.kv.store import KVStore, SequenceKV
from polarlm.engine.kv.tables import BlockTable, TableGroup


@dataclass(frozen=True)
class Snapshot:
    """The K/V of a sequence.

    length: tokens. dropped: for each group, how many quantized blocks have left its window. stored_as: how quantized
    blocks are represented, see `Ops.stored_as`.
    arrays: "<layer>.<place>.<name>" → array. The places are "coded" (the quantized blocks), with the names of
    `engine.backends.transfer`; "sink" and "tail" (the current block), with "k" and "v" (K, tokens, D). A place without
    tokens has no arrays.
    """

    length: int
    dropped: tuple[int, ...]
    stored_as: str
    arrays: Mapping[str, np.ndarray]


def export(store: KVStore, sequence: SequenceKV) -> Snapshot:
    """A copy of everything that the store holds of a sequence."""
    n, arrays = store.shape.block_size, {}
    for (_, layers), table in zip(store.shape.groups, sequence.tables, strict=True):
        slots = (("sink", table.sink, n), ("tail", table.current, sequence.length % n))
        for layer in layers:
            cache = store.cache(layer)
            if table.quantized:
                for name, array in store.ops.read_blocks(cache, table.quantized).items():
                    arrays[f"{layer}.coded.{name}"] = array
            for place, slot, tokens in slots:
                if slot is not None:
                    k, v = store.ops.read_full(cache, slot, tokens)
                    arrays |= {f"{layer}.{place}.k": k, f"{layer}.{place}.v": v}
    dropped = tuple(table.dropped for table in sequence.tables)
    return Snapshot(sequence.length, dropped, store.ops.stored_as, arrays)


def restore(store: KVStore, saved: Snapshot) -> SequenceKV:
    """A sequence with the K/V of a snapshot.

    Raises OutOfBlocks, or ValueError for a snapshot that does not fit this store, and changes nothing.
    """
    sequence = SequenceKV(saved.length, [])
    try:
        for group, (_, layers), dropped in zip(store.groups, store.shape.groups, saved.dropped, strict=True):
            with_sink = f"{layers[0]}.sink.k" in saved.arrays
            sequence.tables.append(_reserve(group, saved.length, dropped, with_sink))
        for (_, layers), table in zip(store.shape.groups, sequence.tables, strict=True):
            for layer in layers:
                _fill(store, layer, table, saved)
    except BaseException:
        for group, table in zip(store.groups, sequence.tables, strict=False):
            group.release(table)
        raise
    return sequence


def _reserve(group: TableGroup, length: int, dropped: int, with_sink: bool) -> BlockTable:
    """A block table with empty blocks for `length` tokens. Raises OutOfBlocks or ValueError and changes nothing."""
    n, oldest = group.block_size, group.oldest_visible(length)
    complete, rest = divmod(length, n)
    quantized = max(0, complete - 1) - dropped
    lacks_sink = complete > 0 and oldest < n and not with_sink
    if quantized < 0 or not 0 <= dropped <= max(0, oldest // n - 1) or lacks_sink or (with_sink and not complete):
        raise ValueError(f"{length} tokens cannot have {quantized} quantized blocks and {dropped} outside the window")
    table = BlockTable(quantized=group.quantized.allocate(quantized), dropped=dropped)
    try:
        slots = group.full.allocate(with_sink + (rest > 0))
    except OutOfBlocks:
        group.release(table)
        raise
    table.sink = slots.pop() if with_sink else None
    table.current = slots.pop() if rest else None
    return table


def _fill(store: KVStore, layer: int, table: BlockTable, saved: Snapshot) -> None:
    """Write one layer's arrays to the blocks of `table`. Raises ValueError if some are missing or do not fit."""
    n, cache = store.shape.block_size, store.cache(layer)
    if table.quantized:
        prefix = f"{layer}.coded."
        arrays = {name.removeprefix(prefix): array for name, array in saved.arrays.items() if name.startswith(prefix)}
        store.ops.write_blocks(cache, table.quantized, arrays)
    for place, slot, tokens in (("sink", table.sink, n), ("tail", table.current, saved.length % n)):
        if slot is None:
            continue
        k, v = (saved.arrays.get(f"{layer}.{place}.{side}") for side in "kv")
        if k is None or v is None or k.ndim != 3 or k.shape[1] != tokens:
            raise ValueError(f"layer {layer} has no {place} of {tokens} tokens")
        store.ops.write_full(cache, slot, k, v)
