"""Export of a sequence from one store and its restoration in another: all of it, or an error and no change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.snapshot import Snapshot, export, restore
from tests.pairs import each
from tests.state.test_store import Fed, N, held, make_store

WINDOWS = (None, 12)


def fed(length: int, codec: str = "polarquant", windows=WINDOWS, seed: int = 0) -> Fed:
    sequence = Fed(make_store(codec, codec, windows=windows), seed)
    sequence.feed(length)
    return sequence


@pytest.mark.parametrize(
    ("codec", "length"),
    [
        *each(["f16", "polarquant", "ring4", "turbo3"], [1, N - 1, N, N + 1, 2 * N]),
        *each(["f16", "polarquant", "ring4", "turbo3"], [44]),
    ],
)
def test_a_restored_sequence_goes_on_as_the_original(codec: str, length: int) -> None:
    original = fed(length, codec)
    saved = export(original.store, original.kv)
    other = Fed(make_store(codec, codec, windows=WINDOWS))
    Fed(other.store, seed=5).feed(30)  # so that blocks lie elsewhere
    other.kv, other.k, other.v = restore(other.store, saved), original.k, original.v
    for count in (1, 1, 20, 1):
        original.rng, other.rng = (np.random.default_rng(count) for _ in range(2))
        assert np.array_equal(original.feed(count), other.feed(count))


def test_a_snapshot_is_a_copy() -> None:
    sequence = fed(44)
    saved = export(sequence.store, sequence.kv)
    before = {name: array.copy() for name, array in saved.arrays.items()}
    sequence.feed(30)
    sequence.store.release(sequence.kv)
    Fed(sequence.store, seed=7).feed(80)
    assert all(np.array_equal(saved.arrays[name], before[name]) for name in before)


def test_a_snapshot_has_only_what_the_sequence_holds() -> None:
    """Layer 0 has all blocks; layer 1 has released its sink and all blocks outside a window of 12."""
    saved = export((sequence := fed(44)).store, sequence.kv)
    assert saved.length == 44
    assert saved.dropped == (0, 3)
    assert saved.arrays["0.coded.k.radius"].shape[1] == 4
    assert saved.arrays["1.coded.k.radius"].shape[1] == 1
    assert saved.arrays["0.sink.k"].shape[1] == N
    assert saved.arrays["0.tail.v"].shape[1] == saved.arrays["1.tail.v"].shape[1] == 44 % N
    assert "1.sink.k" not in saved.arrays


def test_full_precision_is_half_precision() -> None:
    """In 16 bits: also where a file has 32, as those of earlier versions do."""
    sequence = fed(2 * N + 3)
    saved = export(sequence.store, sequence.kv)
    places = [name for name in saved.arrays if ".coded." not in name]
    assert {saved.arrays[name].dtype for name in places} == {np.dtype(np.float16)}
    rng = np.random.default_rng(0)
    exact = {name: rng.standard_normal(saved.arrays[name].shape).astype(np.float32) for name in places}
    exact["0.sink.k"][0, 0, :3] = 1e6, -1e6, 65519.9
    store = make_store("polarquant", "polarquant", windows=WINDOWS)
    again = export(store, restore(store, replace(saved, arrays={**saved.arrays, **exact})))
    for name, wanted in exact.items():
        assert np.array_equal(again.arrays[name], np.clip(wanted, -65504, 65504).astype(np.float16))


def test_an_empty_sequence_has_an_empty_snapshot() -> None:
    store = make_store()
    saved = export(store, store.new_sequence())
    assert (saved.length, saved.arrays) == (0, {})
    assert restore(store, saved) == store.new_sequence()


@pytest.mark.parametrize(("group", "quantized", "full"), [(0, 3, 9), (0, 9, 1), (0, 0, 0), (1, 3, 9), (1, 9, 0)])
def test_restore_without_room_changes_nothing(group: int, quantized: int, full: int) -> None:
    """Four quantized blocks, sink and current block; for the window of 30 no sink."""
    store = make_store("polarquant", "polarquant", windows=(None, None, 30))
    sequence = Fed(make_store("polarquant", "polarquant", windows=(None, None, 30)))
    sequence.feed(44)
    allocators = store.groups[group].quantized, store.groups[group].full
    for allocator, left in zip(allocators, (quantized, full), strict=True):
        allocator.allocate(max(0, allocator.free - left))
    before = held(store)
    with pytest.raises(OutOfBlocks):
        restore(store, export(sequence.store, sequence.kv))
    assert held(store) == before


def without(saved: Snapshot, name: str) -> Snapshot:
    return replace(saved, arrays={key: array for key, array in saved.arrays.items() if key != name})


def with_array(saved: Snapshot, name: str, array: np.ndarray) -> Snapshot:
    return replace(saved, arrays={**saved.arrays, name: array})


WRONG = {
    "no codes": lambda s: without(s, "0.coded.k.radius"),
    "no means": lambda s: without(s, "0.coded.mean.mean"),
    "no sink": lambda s: without(without(s, "0.sink.k"), "0.sink.v"),
    "no values in the sink": lambda s: without(s, "0.sink.v"),
    "no tail": lambda s: without(s, "1.tail.k"),
    "another block": lambda s: with_array(s, "0.coded.k.radius", s.arrays["0.coded.k.radius"][:, 1:]),
    "another type": lambda s: with_array(s, "0.coded.k.radius", s.arrays["0.coded.k.radius"].view(np.int16)),
    "doubles": lambda s: with_array(s, "0.sink.k", s.arrays["0.sink.k"].astype(np.float64)),
    "a head less": lambda s: with_array(s, "0.sink.k", s.arrays["0.sink.k"][1:]),
    "a flat tail": lambda s: with_array(s, "0.tail.k", s.arrays["0.tail.k"].reshape(-1)),
    "longer": lambda s: replace(s, length=s.length + N),
    "longer by one": lambda s: replace(s, length=s.length + 1),
    "negative": lambda s: replace(s, dropped=(0, -1)),
    "dropped too much": lambda s: replace(s, dropped=(1, 3)),
    "groups": lambda s: replace(s, dropped=(0,)),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_snapshot_that_does_not_fit_is_refused_and_changes_nothing(change: str) -> None:
    sequence = fed(44)
    store = make_store("polarquant", "polarquant", windows=WINDOWS)
    with pytest.raises(ValueError):
        restore(store, WRONG[change](export(sequence.store, sequence.kv)))
    assert held(store) == [(0, 0), (0, 0)]
