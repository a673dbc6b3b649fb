"""Recurrent layers: prompts and steps over the ends of blocks, in NumPy and compiled, against the recurrence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights, Mamba2Weights
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.model_loaders.config import GatedDelta, Mamba2, Recurrent
from tests.pairs import in_turn
from tests.recurrence import Weights, conv_inputs, make_rows, make_slots, make_weights, recurrence

SHAPES = [  # and the tokens of a block
    (GatedDelta(2, 4, 8, 12, 4), 16),
    (GatedDelta(2, 6, 16, 32, 3, tiled=True), 8),
    (GatedDelta(1, 1, 32, 16, 2), 12),
    (GatedDelta(3, 3, 20, 7, 4), 64),
    (Mamba2(1, 5, 16, 12, 4), 16),
    (Mamba2(2, 6, 8, 16, 3, conv_bias=False), 8),
    (Mamba2(3, 3, 20, 7, 4), 64),
]


BACKENDS: dict[str, Callable[[], Any]] = {"numpy": lambda: NumpyOps(1)}
with suppress(ImportError):  # tests/cuda runs these bodies on GPU machines without llvmlite, too
    from polarlm.engine.backends.native.recurrent_ops import RecurrentOps
    from polarlm.engine.jit.compile.target import levels
    from tests.backends.native.launching import launcher

    BACKENDS |= {level.name: lambda level=level: RecurrentOps(launcher(level)) for level in levels()}
FULL = ("numpy", list(BACKENDS)[-1])  # every shape here; the other levels differ in how they compile a line
CASES = [
    (name, *SHAPES[number]) for name in BACKENDS for number in range(len(SHAPES)) if name in FULL or number in (1, 4)
]
every_case = in_turn("name shape block", CASES)


def span(place: int, count: int, slot: int = 0, first: int = 0) -> np.ndarray:
    return np.array([DeltaSpan(slot, first, count, place)], np.int32)


def op_of(ops: Any, w: Weights) -> Callable[..., np.ndarray]:
    """The op that adds rows of a layer with these weights."""
    return ops.mamba2 if isinstance(w, Mamba2Weights) else ops.gated_delta


def tiled(w: Weights) -> bool:
    return isinstance(w, DeltaWeights) and w.tiled


def assert_close(actual: np.ndarray, wanted: np.ndarray) -> None:
    """Within 100 roundings of the largest value: sums of a few hundred terms, and exponentials of sums of decays."""
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(wanted).max())


def add_steps(ops: Any, rows: np.ndarray, w: Any, slots: DeltaSlots, splits: list[int]) -> np.ndarray:
    """Add rows to slot 0 in steps of these numbers of rows, which end with blocks, and return their results."""
    block, position, actual = slots.keys.shape[3], 0, []
    for count in splits:
        actual.append(op_of(ops, w)(rows[position : position + count], w, slots, span(position % block, count)))
        position += count
        if position % block == 0:
            ops.advance_delta([slots], [0], tiled=tiled(w))
    return np.concatenate([each.copy() for each in actual])


@every_case
def test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence(name: str, shape: Recurrent, block: int) -> None:
    ops, rng = BACKENDS[name](), np.random.default_rng(block)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 3 * block + 5)
    wanted, matrices = recurrence(rows, w, shape)
    slots, position, results = make_slots(shape, 1, block), 0, []
    inputs = np.empty((2, shape.width - 1, shape.channels), np.float32)
    ends = DeltaEnds([0, 2], np.empty((2, *slots.matrices.shape[1:]), np.float32), inputs)
    for count in (3, block + 1, len(rows) - block - 8):
        part_ends = ends._replace(numbers=[number - position // block for number in ends.numbers])
        part = rows[position : position + count]
        results.append(op_of(ops, w)(part, w, slots, span(position % block, count), part_ends).copy())
        position += count
    for row in rows[position:]:
        results.append(op_of(ops, w)(row[None], w, slots, span(position % block, 1)).copy())
        position += 1
    assert_close(np.concatenate(results), wanted)
    for kept, number in enumerate(ends.numbers):
        end = (number + 1) * block
        assert_close(ends.matrices[kept], matrices[end - 1])
        np.testing.assert_array_equal(ends.inputs[kept], conv_inputs(rows, shape)[end - shape.width + 1 : end])


@every_case
def test_rows_that_are_not_kept_leave_no_trace(name: str, shape: Recurrent, block: int) -> None:
    """Compiled kernels compute a row alone as with others. Products of NumPy differ by roundings, and so may kernels
    that a GPU's compiler has made for one row and for several."""
    ops, rng = BACKENDS[name](), np.random.default_rng(block)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 2 * block + 3)
    alone, together, rejecting = (make_slots(shape, 1, block) for _ in range(3))
    one_by_one = add_steps(ops, rows, w, alone, [1] * len(rows))
    at_once = add_steps(ops, rows, w, together, [4] * (2 * block // 4) + [3])
    kept = []
    for position, row in enumerate(rows):
        drafted = np.concatenate([row[None], make_rows(rng, shape, min(3, block - 1 - position % block))])
        at = span(position % block, len(drafted))
        kept.append(op_of(ops, w)(drafted, w, rejecting, at)[:1].copy())
        if (position + 1) % block == 0:
            ops.advance_delta([rejecting], [0], tiled=tiled(w))
    encodable_runs = getattr(ops, "rows_alike", type(ops) is not NumpyOps)
    equal = np.testing.assert_array_equal if encodable_runs else assert_close
    for actual, slots in ((at_once, together), (np.concatenate(kept), rejecting)):
        equal(actual, one_by_one)
        equal(slots.matrices, alone.matrices)
        equal(slots.updates[:, :, :3], alone.updates[:, :, :3])


@pytest.mark.parametrize(("name", "shape", "block"), [(name, *SHAPES[number]) for name in FULL for number in (0, 4)])
def test_a_step_of_several_sequences_changes_their_slots_alone(name: str, shape: Recurrent, block: int) -> None:
    rng, ops = np.random.default_rng(0), BACKENDS[name]()
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 6)
    slots = make_slots(shape, 4, block)
    untouched = [array[[0, 2]].copy() for array in slots]
    spans = np.array([DeltaSpan(3, 0, 4, 0), DeltaSpan(1, 4, 2, 0)], np.int32)
    actual = op_of(ops, w)(rows, w, slots, spans)
    assert_close(actual, np.concatenate([recurrence(part, w, shape)[0] for part in (rows[:4], rows[4:])]))
    for before, after in zip(untouched, slots, strict=True):
        np.testing.assert_array_equal(before, after[[0, 2]])


@pytest.mark.parametrize("shape", [GatedDelta(1, 1, 8, 8, 2), Mamba2(1, 1, 8, 8, 2)])
def test_heads_without_room_in_scratch_are_computed_by_numpy(shape: Recurrent) -> None:
    block, rng = 512, np.random.default_rng(0)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 5)
    actual = op_of(BACKENDS[FULL[-1]](), w)(rows, w, make_slots(shape, 1, block), span(0, 5))
    assert_close(actual, recurrence(rows, w, shape)[0])
