"""Snapshots: copies on the host of everything that the store holds of a sequence, and their way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.state.store import KVStore, SequenceKV


@dataclass(frozen=True)
class Snapshot:
    """The state of a sequence.

    length: tokens. dropped: for each group, how many quantized blocks have left its window. stored_as: how quantized
    blocks are represented, see `Ops.stored_as`. arrays: of all groups, by the names that their `snapshot` gives them.
    """

    length: int
    dropped: tuple[int, ...]
    stored_as: str
    arrays: Mapping[str, np.ndarray]


def export(store: KVStore, sequence: SequenceKV) -> Snapshot:
    """A copy of everything that the store holds of a sequence."""
    arrays: dict[str, np.ndarray] = {}
    for group, table in zip(store.groups, sequence.tables, strict=True):
        arrays |= group.snapshot(table, sequence.length)
    dropped = tuple(table.dropped for table in sequence.tables)
    return Snapshot(sequence.length, dropped, store.ops.stored_as, arrays)


def restore(store: KVStore, saved: Snapshot) -> SequenceKV:
    """A sequence with the state of a snapshot.

    Raises OutOfBlocks, or ValueError for a snapshot that does not fit this store, and changes nothing.
    """
    sequence = SequenceKV(saved.length, [])
    try:
        for group, dropped in zip(store.groups, saved.dropped, strict=True):
            sequence.tables.append(group.restore(saved.arrays, saved.length, dropped))
    except BaseException:
        for group, table in zip(store.groups, sequence.tables, strict=False):
            group.release(table)
        raise
    return sequence
