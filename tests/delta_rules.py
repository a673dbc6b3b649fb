"""Gated delta rules against the recurrence, for any backend: prompts and steps over the ends of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan
from polarlm.model_loaders.config import GatedDelta
from tests.recurrence import make_rows, make_slots, make_weights, recurrence


def span(place: int, count: int, slot: int = 0, first: int = 0) -> np.ndarray:
    return np.array([DeltaSpan(slot, first, count, place)], np.int32)


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Within 100 roundings of the largest value: sums of a few hundred terms, and exponentials of sums of decays."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(wanted).max())


def add_steps(ops: Any, rows: np.ndarray, w: Any, slots: DeltaSlots, splits: list[int]) -> np.ndarray:
    """Add rows to slot 0 in steps of these numbers of rows, which end with blocks, and return their results."""
    block, position, found = slots.keys.shape[3], 0, []
    for count in splits:
        found.append(ops.gated_delta(rows[position : position + count], w, slots, span(position % block, count)))
        position += count
        if position % block == 0:
            ops.advance_delta([slots], [0], tiled=w.tiled)
    return np.concatenate([each.copy() for each in found])


def check_prompts_and_steps(ops: Any, shape: GatedDelta, block: int) -> None:
    """A prompt in parts, and steps after it; the states of two ends of blocks are kept."""
    rng = np.random.default_rng(block)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 3 * block + 5)
    wanted, matrices = recurrence(rows, w, shape)
    slots, position, results = make_slots(shape, 1, block), 0, []
    inputs = np.empty((2, shape.width - 1, shape.channels), np.float32)
    ends = DeltaEnds([0, 2], np.empty((2, *slots.matrices.shape[1:]), np.float32), inputs)
    for count in (3, block + 1, len(rows) - block - 8):
        own = ends._replace(numbers=[number - position // block for number in ends.numbers])
        part = rows[position : position + count]
        results.append(ops.gated_delta(part, w, slots, span(position % block, count), own).copy())
        position += count
    for row in rows[position:]:
        results.append(ops.gated_delta(row[None], w, slots, span(position % block, 1)).copy())
        position += 1
    assert_close(np.concatenate(results), wanted)
    for kept, number in enumerate(ends.numbers):
        end = (number + 1) * block
        assert_close(ends.matrices[kept], matrices[end - 1])
        np.testing.assert_array_equal(ends.inputs[kept], rows[end - shape.width + 1 : end, : shape.channels])


def check_rows_that_are_not_kept(
    ops: Any, shape: GatedDelta, block: int, equal: Callable[[np.ndarray, np.ndarray], None]
) -> None:
    """Rows one by one, several at once, and with others that are dropped leave the same state."""
    rng = np.random.default_rng(block)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 2 * block + 3)
    alone, together, rejecting = (make_slots(shape, 1, block) for _ in range(3))
    one_by_one = add_steps(ops, rows, w, alone, [1] * len(rows))
    at_once = add_steps(ops, rows, w, together, [4] * (2 * block // 4) + [3])
    kept = []
    for position, row in enumerate(rows):
        drafted = np.concatenate([row[None], make_rows(rng, shape, min(3, block - 1 - position % block))])
        at = span(position % block, len(drafted))
        kept.append(ops.gated_delta(drafted, w, rejecting, at)[:1].copy())
        if (position + 1) % block == 0:
            ops.advance_delta([rejecting], [0], tiled=w.tiled)
    assert_close(one_by_one, recurrence(rows, w, shape)[0])
    for found, slots in ((at_once, together), (np.concatenate(kept), rejecting)):
        equal(found, one_by_one)
        equal(slots.matrices, alone.matrices)
        equal(slots.updates[:, :, :3], alone.updates[:, :, :3])


def check_several_sequences(ops: Any, shape: GatedDelta, block: int) -> None:
    """A step of several sequences changes their slots alone."""
    rng = np.random.default_rng(0)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 6)
    slots = make_slots(shape, 4, block)
    untouched = [array[[0, 2]].copy() for array in slots]
    spans = np.array([DeltaSpan(3, 0, 4, 0), DeltaSpan(1, 4, 2, 0)], np.int32)
    found = ops.gated_delta(rows, w, slots, spans)
    assert_close(found, np.concatenate([recurrence(part, w, shape)[0] for part in (rows[:4], rows[4:])]))
    for before, after in zip(untouched, slots, strict=True):
        np.testing.assert_array_equal(before, after[[0, 2]])
