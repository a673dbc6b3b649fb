"""Export of a sequence from one store and its restoration in another: all of it, or an error and no change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.storage.copies import Snapshot, export, restore
from polarlm.engine.storage.objects import Object
from tests.state.fed import Fed, N, held, make_store

WINDOWS = (None, 12)


def fed(length: int, codec: str = "polarquant", windows=WINDOWS) -> Fed:
    sequence = Fed(make_store(codec, codec, windows=windows))
    sequence.feed(length)
    return sequence


def exported(sequence: Fed) -> Snapshot:
    return export(sequence.store, sequence.kv, [0] * sequence.kv.length)


def test_an_empty_sequence_has_an_empty_snapshot() -> None:
    store = make_store()
    saved = export(store, store.new_sequence(), [])
    assert (saved.length, saved.blocks) == (0, {})
    assert restore(store, saved) == store.new_sequence()


def test_restore_without_room_changes_nothing() -> None:
    """Four quantized blocks, sink and current block; for the window of 30 no sink."""
    for group, quantized, full in ((0, 3, 9), (0, 9, 1), (0, 0, 0), (1, 3, 9), (1, 9, 0)):
        store = make_store("polarquant", "polarquant", windows=(None, None, 30))
        sequence = Fed(make_store("polarquant", "polarquant", windows=(None, None, 30)))
        sequence.feed(44)
        allocators = store.groups[group].quantized, store.groups[group].full
        for allocator, left in zip(allocators, (quantized, full), strict=True):
            allocator.allocate(max(0, allocator.free - left))
        before = held(store)
        with pytest.raises(OutOfBlocks):
            restore(store, exported(sequence))
        assert held(store) == before


def with_block(saved: Snapshot, number: int, payload: np.ndarray | None = None, **header: object) -> Snapshot:
    """With another payload or another header of a block."""
    (block,) = saved.blocks[number]
    other = Object({**block.header, **header}, block.payload if payload is None else payload)
    return replace(saved, blocks={**saved.blocks, number: [other]})


def with_blocks(saved: Snapshot, *numbers: int) -> Snapshot:
    return replace(saved, blocks={number: saved.blocks[number] for number in numbers})


WRONG = {
    "no sink": lambda s: with_blocks(s, 1, 2, 3, 4, 5),
    "no tail": lambda s: with_blocks(s, 0, 1, 2, 3, 4),
    "a gap": lambda s: with_blocks(s, 0, 1, 3, 4, 5),
    "nothing": lambda s: with_blocks(s),
    "a group more": lambda s: with_block(s, 2, groups=3),
    "a group less": lambda s: with_block(s, 4, groups=1),
    "a shorter payload": lambda s: with_block(s, 2, s.blocks[2][0].payload[:-64]),
    "a shorter sink": lambda s: with_block(s, 0, s.blocks[0][0].payload[:-64]),
    "fewer ids": lambda s: with_block(s, 5, ids=[0]),
    "records": lambda s: with_block(s, 2, stored_as="records 999"),
    "longer": lambda s: replace(s, length=s.length + N),
    "longer by one": lambda s: replace(s, length=s.length + 1),
}


def test_a_snapshot_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    saved, store = exported(fed(44)), make_store("polarquant", "polarquant", windows=WINDOWS)
    for change in WRONG.values():
        with pytest.raises(ValueError):
            restore(store, change(saved))
        assert held(store) == [(0, 0), (0, 0)]
