"""Recurrent layers on every backend: prompts and steps over the ends of blocks, against the recurrence in float64, and
short convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.cuda import recurrent
from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights, Mamba2Weights, SlotRows
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.model_loaders.config import ChannelDelta, GatedDelta, Mamba2, Recurrent
from tests.cuda.emulated import EmulatedDevice
from tests.ops.backends import BEST, CUDA, EVERY_LEVEL, NUMPY, SOME, Backend, backend_cases, backends
from tests.pairs import mostly_slow, pairs
from tests.recurrence import Weights, conv_inputs, make_rows, make_slots, make_weights, op_of, op_rows, recurrence

SHAPES = [  # and the tokens of a block
    (GatedDelta(2, 4, 8, 12, 4), 16),
    (GatedDelta(2, 6, 16, 32, 3, tiled=True), 8),
    (GatedDelta(1, 1, 32, 16, 2), 12),
    (GatedDelta(3, 3, 20, 7, 4), 64),
    (Mamba2(1, 5, 16, 12, 4), 16),
    (Mamba2(2, 6, 8, 16, 3, conv_bias=False), 8),
    (Mamba2(3, 3, 20, 7, 4), 64),
    (ChannelDelta(2, 2, 8, 12, 4), 16),
    (ChannelDelta(3, 3, 20, 7, 3), 64),
]
OF_GPU = [
    (GatedDelta(2, 4, 8, 12, 4), 16),
    (GatedDelta(2, 6, 16, 32, 3, tiled=True), 8),
    (GatedDelta(1, 1, 32, 16, 2), 24),
    (GatedDelta(1, 2, 72, 76, 4), 64),  # several warps, slices of a matrix, more rows of it than a thread holds
    (Mamba2(1, 11, 16, 12, 4), 16),  # more heads than a block of threads has
    (Mamba2(2, 6, 8, 16, 3, conv_bias=False), 8),
    (Mamba2(3, 3, 32, 16, 2), 24),
    (Mamba2(1, 2, 72, 76, 4), 64),
    (ChannelDelta(2, 2, 8, 12, 4), 16),
    (ChannelDelta(3, 3, 24, 8, 3), 64),
    (ChannelDelta(2, 2, 72, 76, 4), 64),
]
FULL = [NUMPY, *BEST]  # every shape here; the other levels differ in how they compile a line
CASES: list[tuple[Backend, Recurrent, int]] = [(backend, *of) for backend in FULL for of in SHAPES]
OF_LEVELS = [(backend, *SHAPES[number]) for backend in EVERY_LEVEL[:-1] for number in (1, 4, 7)]
CASES += OF_LEVELS[::4]  # with each of the shapes


class Layer:
    """The slots of `count` sequences on the device of ops, and the op that adds rows to them."""

    def __init__(self, ops: Any, shape: Recurrent, w: Weights, block: int, count: int = 1):
        self.ops, self.block = ops, block
        self.tiled = isinstance(w, DeltaWeights) and w.tiled
        self.slots = DeltaSlots(*map(ops.to_device, make_slots(shape, count, block)))
        arrays = {name: ops.to_device(x) for name, x in w._asdict().items() if isinstance(x, np.ndarray)}
        self._w, self._shape = w._replace(**arrays), shape
        self._op = op_of(ops, shape)

    def add(self, rows: np.ndarray, spans: np.ndarray, ends: DeltaEnds | None = None) -> np.ndarray:
        """The results (T, H·D). ends: of a prompt."""
        at = spans if ends is not None else self.ops.to_device(spans)
        inputs = map(self.ops.to_device, op_rows(rows, self._shape))
        return np.array(self.ops.to_host(self._op(*inputs, self._w, SlotRows(self.slots, at, ends))))

    def add_steps(self, rows: np.ndarray, splits: Sequence[int]) -> np.ndarray:
        """Add rows to slot 0 in steps of these numbers of rows, which end with blocks."""
        position, results = 0, []
        for count in splits:
            results.append(self.add(rows[position : position + count], span(position % self.block, count)))
            position += count
            self.advance(position)
        return np.concatenate(results)

    def advance(self, position: int) -> None:
        if position % self.block == 0:
            self.ops.advance_delta([self.slots], [0], tiled=self.tiled)

    def host(self) -> DeltaSlots:
        return DeltaSlots(*(np.array(self.ops.to_host(x)) for x in self.slots))

    def ends(self, numbers: Sequence[int], shape: Recurrent) -> DeltaEnds:
        """Room for the states after these blocks."""
        matrices = np.empty((len(numbers), *self.slots.matrices.shape[1:]), np.float32)
        inputs = np.empty((len(numbers), shape.width - 1, shape.channels), np.float32)
        return DeltaEnds(list(numbers), *map(self.ops.to_device, (matrices, inputs)))


def span(place: int, count: int, slot: int = 0, first: int = 0) -> np.ndarray:
    return np.array([DeltaSpan(slot, first, count, place)], np.int32)


def assert_close(actual: np.ndarray, wanted: np.ndarray) -> None:
    """Within 100 roundings of the largest value: sums of a few hundred terms, and exponentials of sums of decays."""
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(wanted).max())


def check_prompt(ops: Any, shape: Recurrent, block: int) -> None:
    """A prompt in parts and the steps after it."""
    rng = np.random.default_rng(block)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 3 * block + 5)
    wanted, matrices = recurrence(rows, w, shape)
    layer, position, results = Layer(ops, shape, w, block), 0, []
    ends = layer.ends([0, 2], shape)
    for count in (3, block + 1, len(rows) - block - 8):
        part_ends = ends._replace(numbers=[number - position // block for number in ends.numbers])
        results.append(layer.add(rows[position : position + count], span(position % block, count), part_ends))
        position += count
    for row in rows[position:]:
        results.append(layer.add(row[None], span(position % block, 1)))
        position += 1
    assert_close(np.concatenate(results), wanted)
    for kept, number in enumerate(ends.numbers):
        end = (number + 1) * block
        assert_close(ops.to_host(ends.matrices)[kept], matrices[end - 1])
        kept_inputs = conv_inputs(rows, shape)[end - shape.width + 1 : end]
        np.testing.assert_array_equal(ops.to_host(ends.inputs)[kept], kept_inputs)


OF_MODELS = [GatedDelta(1, 2, 128, 128, 4), ChannelDelta(2, 2, 128, 128, 4), Mamba2(2, 4, 128, 64, 4)]
OF_MODELS += [Mamba2(1, 9, 128, 64, 4), Mamba2(1, 9, 256, 64, 4)]


@backend_cases("ops shape block", CASES, slow=[*OF_LEVELS, *((CUDA, shape, 64) for shape in OF_MODELS)])
def test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence(ops: Any, shape: Recurrent, block: int) -> None:
    check_prompt(ops, shape, block)


# Blocks of a prompt that are computed at a time, at most; columns of a slice of a matrix; terms of a chunk's product.
PARTS = [(1, 16, 32), (2, 32, 16), (100, 64, 32)]


@backends(CUDA)
@mostly_slow("layer, part", product(OF_GPU, PARTS), [(OF_GPU[number], PARTS[1]) for number in (0, 4, 8)])
def test_a_prompt_on_a_gpu_is_the_recurrence(
    ops: Any, monkeypatch: pytest.MonkeyPatch, layer: tuple[Recurrent, int], part: tuple[int, int, int]
) -> None:
    """Shapes decide the tiles of a matrix, blocks the launches that each tile is carried through."""
    (shape, block), (blocks, columns, terms) = layer, part
    monkeypatch.setattr(recurrent, "PROMPT_ROWS", blocks * block)
    monkeypatch.setattr(recurrent, "_SLICES", (columns,))
    monkeypatch.setattr(recurrent, "_CHUNKS", (terms,))
    check_prompt(ops, shape, block)


@backend_cases("ops shape block", [*CASES, *((CUDA, *OF_GPU[number]) for number in (0, 3, 5, 8, 9))], slow=OF_LEVELS)
def test_rows_that_are_not_kept_leave_no_trace(ops: Any, shape: Recurrent, block: int) -> None:
    """Compiled kernels compute a row alone as with others. Products of NumPy differ by roundings, and so may kernels
    that a GPU's compiler has made for one row and for several."""
    rng = np.random.default_rng(block)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 2 * block + 3)
    alone, together, rejecting = (Layer(ops, shape, w, block) for _ in range(3))
    one_by_one = alone.add_steps(rows, [1] * len(rows))
    at_once = together.add_steps(rows, [4] * (2 * block // 4) + [3])
    kept = []
    for position, row in enumerate(rows):
        drafted = np.concatenate([row[None], make_rows(rng, shape, min(3, block - 1 - position % block))])
        kept.append(rejecting.add(drafted, span(position % block, len(drafted)))[:1])
        rejecting.advance(position + 1)
    same = isinstance(ops._device, EmulatedDevice) if ops.backend == "cuda" else ops.backend == "native"
    equal = np.testing.assert_array_equal if same else assert_close
    wanted = alone.host()
    for actual, layer in ((at_once, together), (np.concatenate(kept), rejecting)):
        equal(actual, one_by_one)
        equal(layer.host().matrices, wanted.matrices)
        equal(layer.host().updates[:, :, :3], wanted.updates[:, :, :3])


@backend_cases(
    "ops shape block",
    [
        *((one, *SHAPES[number]) for one in FULL for number in (0, 4, 7)),
        *((CUDA, *OF_GPU[number]) for number in (0, 4, 8)),
    ],
)
def test_a_step_of_several_sequences_changes_their_slots_alone(ops: Any, shape: Recurrent, block: int) -> None:
    rng = np.random.default_rng(0)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 6)
    layer = Layer(ops, shape, w, block, 4)
    untouched = [array[[0, 2]] for array in layer.host()]
    actual = layer.add(rows, np.array([DeltaSpan(3, 0, 4, 0), DeltaSpan(1, 4, 2, 0)], np.int32))
    assert_close(actual, np.concatenate([recurrence(part, w, shape)[0] for part in (rows[:4], rows[4:])]))
    for before, after in zip(untouched, layer.host(), strict=True):
        np.testing.assert_array_equal(before, after[[0, 2]])


@backends(*BEST)
@pytest.mark.parametrize("shape", [GatedDelta(1, 1, 8, 8, 2), ChannelDelta(1, 1, 8, 8, 2), Mamba2(1, 1, 8, 8, 2)])
def test_heads_without_room_in_scratch_are_computed_by_numpy(
    ops: Any, rng: np.random.Generator, shape: Recurrent
) -> None:
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 5)
    assert_close(Layer(ops, shape, w, 512).add(rows, span(0, 5)), recurrence(rows, w, shape)[0])


@backends(NUMPY, *BEST, CUDA)
def test_channels_may_decay_at_once_or_never(ops: Any, rng: np.random.Generator) -> None:
    """Beside each other in a head: e to the power of a difference of their logarithms would overflow."""
    shape, block = ChannelDelta(2, 2, 16, 12, 4), 16
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 3 * block)
    w = w._replace(dt_bias=np.resize(np.float32([200, -200]), len(w.dt_bias)))
    check_one_prompt(ops, rows, w._replace(decay=np.float32([-16, -1])), shape, block)


@backends(CUDA)
@pytest.mark.parametrize(
    ("shape", "block", "sizes"),
    [
        (GatedDelta(1, 2, 16, 16, 3), 16, (1e-9, 1, 1)),
        (GatedDelta(1, 2, 16, 16, 3), 16, (100, 1, 1)),
        (Mamba2(1, 2, 24, 16, 3), 64, (1, 30, 1)),  # products take 16 terms, and this one lacks some
        (Mamba2(1, 2, 16, 16, 3), 16, (1e-9, 1e-9, 1e-9)),
        (Mamba2(1, 2, 16, 16, 3), 16, (100, 1e-6, 100)),
    ],
)
def test_numbers_of_any_size_are_multiplied_as_exactly(
    ops: Any, rng: np.random.Generator, shape: Recurrent, block: int, sizes: tuple[float, float, float]
) -> None:
    """sizes: how large values, keys and queries are. Gated delta rules normalise keys and queries."""
    w, values, keys = make_weights(rng, shape), shape.value_heads * shape.value_dim, shape.key_dim
    rows = make_rows(rng, shape, 2 * block)
    if isinstance(w, Mamba2Weights):
        w, order = w._replace(bias=None), (slice(0, values), slice(values, values + keys), slice(values + keys, None))
    else:
        order = slice(2 * keys, None), slice(keys, 2 * keys), slice(0, keys)
    for channels, size in zip(order, sizes, strict=True):
        w.conv[:, channels] *= size
    check_one_prompt(ops, rows, w, shape, block)


def check_one_prompt(ops: Any, rows: np.ndarray, w: Weights, shape: Recurrent, block: int) -> None:
    """All rows at once, and the state after the last block."""
    wanted, matrices = recurrence(rows, w, shape)
    layer = Layer(ops, shape, w, block)
    ends = layer.ends([len(rows) // block - 1], shape)
    assert_close(layer.add(rows, span(0, len(rows)), ends), wanted)
    assert_close(ops.to_host(ends.matrices)[0], matrices[-1])


@backends(CUDA)
def test_a_block_that_adds_nothing_leaves_a_large_matrix(ops: Any, rng: np.random.Generator) -> None:
    """Its updates are 0, and would have any scale."""
    shape, block = Mamba2(1, 1, 16, 16, 2), 16
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 3 * block)
    w = w._replace(conv=np.abs(w.conv), bias=None, decay=np.float32([-1e-3]))
    values = conv_inputs(rows, shape)[:, :16]
    values[:] = np.abs(values) * np.float32(1e17)
    values[block:] = 0
    check_one_prompt(ops, rows, w, shape, block)


@backends(CUDA)
@pytest.mark.parametrize(("shape", "block"), [OF_GPU[0], OF_GPU[4], OF_GPU[8]])
def test_an_empty_row_changes_no_slot(ops: Any, rng: np.random.Generator, shape: Recurrent, block: int) -> None:
    """As batches are filled up with: its result is 0."""
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 2)
    layer = Layer(ops, shape, w, block, 2)
    untouched = [array[0] for array in layer.host()]
    results = layer.add(rows, np.array([DeltaSpan(1, 0, 1, 0), DeltaSpan(0, 0, 0, 0)], np.int32))
    assert_close(results[:1], recurrence(rows[:1], w, shape)[0])
    assert not results[1].any()
    for before, after in zip(untouched, layer.host(), strict=True):
        np.testing.assert_array_equal(before, after[0])


# -- short convolutions ----------------------------------------------------------------------------------------------

N = 8  # rows of a block
# 1 + slot, place, 1 + next slot, rows before: of a prompt, of a step over the end of a block, of another sequence.
PROMPT = [(2, place, 0, back) for back, place in enumerate((3, 4, 5))]
STEP = [(1, 6, 4, 0), (1, 7, 4, 1), (4, 0, 0, 2), (4, 1, 0, 3)]
ROWS = np.array([*PROMPT, *STEP, (3, 7, 0, 0)], np.int32)


@backends(*SOME)
def test_short_convolutions_and_slots_are_those_of_numpy(ops: Any, rng: np.random.Generator) -> None:
    """Rows of prompts, of several sequences, and over the end of a block."""
    for width, channels, has_bias in pairs([2, 3, 4], [16, 24, 96], [False, True]):
        inputs = rng.standard_normal((len(ROWS), 3 * channels)).astype(np.float32)
        conv = rng.standard_normal((width, channels)).astype(np.float32)
        bias = rng.standard_normal(channels).astype(np.float32) if has_bias else None
        slots = rng.standard_normal((4, width - 1 + N, channels)).astype(np.float32)
        own = slots.copy()
        wanted = NumpyOps(1).short_conv(inputs, conv, bias, SlotRows(slots, ROWS))
        np.testing.assert_allclose(
            ops.short_conv(inputs, conv, bias, SlotRows(own, ROWS)), wanted, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_array_equal(own, slots)


@backends(*BEST)
def test_a_row_without_a_slot_writes_nothing(ops: Any) -> None:
    slots, rows = np.ones((1, 2 + N, 16), np.float32), np.zeros((1, 4), np.int32)
    ops.short_conv(np.ones((1, 48), np.float32), np.ones((3, 16), np.float32), None, SlotRows(slots, rows))
    assert (slots == 1).all()
