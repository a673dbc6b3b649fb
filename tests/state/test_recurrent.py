"""The states of recurrent layers in any order of prompts, steps, rejected rows, aborts, preemptions, snapshots and
copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.layer_state import BlockArrays, Buffers
from polarlm.engine.state.recurrent.conv_inputs import ConvShape
from polarlm.engine.state.recurrent.delta import DeltaShape, DeltaTable, places_to_guess
from polarlm.engine.state.recurrent.slots import add_rows
from polarlm.engine.state.tables import BlockTable
from polarlm.model_loaders.config import ChannelDelta, GatedDelta, Mamba2
from tests.pairs import mostly_slow
from tests.recurrence import make_rows, make_weights, op_of, op_rows, recurrence

N = 4
Shape = ConvShape | GatedDelta | ChannelDelta | Mamba2
SHAPES = [ConvShape(2, 2), ConvShape(2, 4), GatedDelta(1, 2, 4, 3, 3), Mamba2(1, 2, 4, 3, 3)]
SHAPES.append(ChannelDelta(2, 2, 4, 3, 3))


@dataclass
class Running:
    """A sequence: its rows, and for each layer what it began with at position `base`, a multiple of N."""

    rows: np.ndarray
    table: BlockTable
    base: int = 0
    start: dict[int, tuple[np.ndarray, np.ndarray]] | None = None


def convolved(rows: np.ndarray, conv: np.ndarray) -> np.ndarray:
    """The results of a short convolution for rows [B | C | x] of a whole sequence."""
    gate, gate_out, x = np.split(rows.astype(np.float64), 3, axis=1)
    padded = np.concatenate([np.zeros((len(conv) - 1, x.shape[1])), gate * x])
    return gate_out * sum(weight * padded[at : at + len(rows)] for at, weight in enumerate(conv))


class Schedules(RuleBasedStateMachine):
    """Sequences whose results follow the recurrence from the beginning, or from the snapshot they began with."""

    @initialize(seed=st.integers(0, 99), shape=st.sampled_from(SHAPES))
    def start(self, seed: int, shape: Shape) -> None:
        self.rng, self.shape = np.random.default_rng(seed), shape
        ops = self.ops = NumpyOps(1)
        if isinstance(shape, ConvShape):
            self.op: Any = ops.short_conv
            self.state: Any = shape.state(ops, N, (3, 5), (12, 8))
            self.weights: dict[int, tuple[Any, ...]] = {
                layer: (self.rng.standard_normal((shape.width, shape.channels)).astype(np.float32), None)
                for layer in (3, 5)
            }
        else:
            self.op = op_of(ops, shape)
            self.state = DeltaShape(shape).state(ops, N, (3, 5), (6, 5))
            self.weights = {layer: (make_weights(self.rng, shape),) for layer in (3, 5)}
        self.running: list[Running] = []
        self.waiting: list[tuple[Running, BlockArrays]] = []

    def new_rows(self, count: int) -> np.ndarray:
        if isinstance(self.shape, ConvShape):
            return self.rng.standard_normal((count, 3 * self.shape.channels)).astype(np.float32)
        return make_rows(self.rng, self.shape, count)

    def add(self, sequence: Running, view: Any, rows: np.ndarray, count: int, layer: int) -> None:
        """Add the last `count` of the sequence's `rows`, and check their results."""
        spans, slots, weights = self.state.spans([view]), self.state.cache(layer), self.weights[layer]
        new, *more = op_rows(rows[len(rows) - count :], self.shape)
        results = add_rows(self.ops, self.op, new, [*more, *weights], slots, spans)
        if isinstance(self.shape, ConvShape):
            expected = convolved(rows, weights[0])
        else:
            start = sequence.start and sequence.start[layer]
            expected, _ = recurrence(rows[sequence.base :], weights[0], self.shape, start)
        expected = expected[len(expected) - count :]
        np.testing.assert_allclose(results, expected, rtol=0, atol=3e-5 * max(1, np.abs(expected).max()))

    @rule()
    def begin(self) -> None:
        if len(self.running) < 3:
            self.running.append(Running(self.new_rows(0), self.state.new_table()))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 25), unit=st.integers(1, 9), aborts=st.booleans())
    def prompt(self, data: st.DataObject, count: int, unit: int, aborts: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        begin, table = len(sequence.rows), sequence.table
        rows = np.concatenate([sequence.rows, self.new_rows(count)])
        try:
            reservation = self.state.open(table, begin, count, Buffers(count), as_steps=False)
        except OutOfBlocks:
            return
        for layer in self.weights:
            self.state.begin([layer], table, reservation, begin)
            for first in range(0, count, unit):
                size = min(unit, count - first)
                view = self.state.view(layer, table, reservation, begin, slice(0, size), begin + first)
                self.add(sequence, view, rows[: begin + first + size], size, layer)
            self.state.seal([layer], reservation, begin, count)
        if aborts:
            self.state.abort(reservation)
            return
        sequence.rows = rows
        self.state.commit(table, reservation, len(rows))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, N + 2), kept=st.integers(0, N + 2))
    def step(self, data: st.DataObject, count: int, kept: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        begin, table = len(sequence.rows), sequence.table
        count = min(count, N - begin % N) if self.state.is_sparse else count
        rows = np.concatenate([sequence.rows, self.new_rows(count)])
        try:
            reservation = self.state.open_step(table, begin, count)
        except OutOfBlocks:
            return
        for layer in self.weights:
            view = self.state.view(layer, table, reservation, begin, slice(0, count), begin)
            self.add(sequence, view, rows, count, layer)
        sequence.rows = rows[: begin + min(kept, count)]
        self.state.commit(table, reservation, len(sequence.rows))

    @precondition(lambda self: self.running and self.state.is_sparse)
    @rule(data=st.data())
    def begin_with_a_snapshot(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if len(self.running) == 3 or not sequence.table.snapshots:
            return
        number, block = data.draw(st.sampled_from(sorted(sequence.table.snapshots.items())))
        end = (number + 1) * N
        table = self.state.share([None] * number + [block], (), end)
        arrays, start = self.state.read_blocks([block]), {}
        for layer, (weights,) in self.weights.items():
            kept = {name: array[0] for (number, name), array in arrays.items() if number == layer}
            decoded = EIGHT_BITS.decode(kept)
            before = sequence.start and sequence.start[layer]
            if end > sequence.base:
                exact = recurrence(sequence.rows[sequence.base : end], weights, self.shape, before)[1][-1]
                assert (np.abs(decoded - exact) <= 0.51 * kept["scales"][:, None] + 1e-5).all()
            start[layer] = decoded, kept["inputs"]
        self.running.append(Running(sequence.rows[:end], table, end, start))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begin_with_a_copy(self, data: st.DataObject) -> None:
        """Begin with all blocks of a sequence, whose current block is cut anywhere, or with fewer blocks."""
        sequence = data.draw(st.sampled_from(self.running))
        table, complete = sequence.table, len(sequence.rows) // N
        if len(self.running) == 3 or (self.state.is_sparse and table.current is None):
            return
        least = complete * N if self.state.is_sparse else 0
        length = data.draw(st.integers(least, len(sequence.rows)))
        if self.state.is_sparse:
            copy: BlockTable = DeltaTable()
        else:
            length = length if length >= complete * N else length // N * N
            blocks = [table.block(number) if number else table.sink for number in range(length // N)]
            copy = self.state.share(blocks, (), length)
        if length % N or self.state.is_sparse:
            try:
                (copy.current,) = self.state.full.allocate(1)
            except OutOfBlocks:
                self.state.release(copy)
                return
            self.state.copy_full(copy.current, table.current, length % N)
        self.running.append(Running(sequence.rows[:length], copy, sequence.base, sequence.start))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep_the_end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if len(sequence.rows) >= 2 * N and len(sequence.rows) % N == 0:
            block = self.state.keep_end(sequence.table, len(sequence.rows))
            assert block is not None or not self.state.quantized.free or not self.state.is_sparse

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def moves(self, data: st.DataObject) -> None:
        """Slots and blocks that are read and written back into others are the same."""
        table = data.draw(st.sampled_from(self.running)).table
        blocks: Any = table.snapshots if self.state.is_sparse else table.quantized
        try:
            for key, block in list(blocks.items() if self.state.is_sparse else enumerate(blocks)):
                (other,) = self.state.quantized.allocate(1)
                self.state.write_blocks([other], self.state.read_blocks([block]))
                self.state.quantized.release(block)
                blocks[key] = other
            if table.current is not None:
                (slot,) = self.state.full.allocate(1)
                self.state.write_full(slot, self.state.read_full(table.current, N))
                self.state.full.release(table.current)
                table.current = slot
        except OutOfBlocks:
            pass

    @precondition(lambda self: self.running and self.state.is_sparse)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A sequence gives up its slot; what it knew waits outside."""
        index = data.draw(st.integers(0, len(self.running) - 1))
        sequence = self.running[index]
        if sequence.table.current is not None and len(sequence.rows):
            del self.running[index]
            arrays = self.state.read_full(sequence.table.current, len(sequence.rows) % N)
            self.waiting.append((sequence, {key: array.copy() for key, array in arrays.items()}))
            self.state.release(sequence.table)

    @precondition(lambda self: self.waiting and len(self.running) < 3)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.waiting) - 1))
        sequence, saved = self.waiting[index]
        try:
            complete = len(sequence.rows) // N
            sequence.table = self.state.reserve_table(len(sequence.rows), max(0, complete - 1), 0, with_sink=False)
        except OutOfBlocks:
            return
        self.state.write_full(sequence.table.current, saved)
        self.running.append(sequence)
        del self.waiting[index]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        self.state.release(self.running.pop(index).table)

    @invariant()
    def nothing_leaks(self) -> None:
        if getattr(self, "running", None) == []:
            assert self.state.quantized.free == self.state.quantized.size
            assert self.state.full.free == self.state.full.size


@mostly_slow("examples", [8, 100], [8])
def test_schedules(examples: int) -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=examples))


def test_places_to_guess_are_ever_fewer_with_the_distance_from_the_end() -> None:
    assert places_to_guess(range(1, 1), ()) == places_to_guess(range(1, 2), ()) == []
    assert places_to_guess(range(20, 300), ()) == [295, 283, 235, 43]
    assert places_to_guess(range(60, 300), ()) == [295, 283, 235]
    assert places_to_guess(range(20, 300), [3, 19, 20, 50, 90, 140, 200, 280, 299, 300]) == [280, 90]
    assert places_to_guess(range(20, 300), [*range(40, 280, 10)]) == [270, 240, 120]
    assert places_to_guess(range(20, 23), [3, 20, 22]) == [20]


@pytest.mark.parametrize(("room", "kept"), [(2, [5]), (3, [4, 5]), (4, [1, 4, 5]), (9, [1, 4, 5])])
def test_guesses_take_room_that_nothing_else_needs(room: int, kept: list[int]) -> None:
    """The end of a prompt is certain, edges of messages are guesses, and one block is kept that a prompt may find."""
    state = DeltaShape(GatedDelta(1, 2, 4, 3, 3)).state(NumpyOps(1), N, (3,), (room, 5))
    (other,) = state.quantized.allocate()
    state.quantized.keep(other, lambda: pytest.fail("it is still of use"))
    state.quantized.release(other)
    table = state.new_table()
    table.edges = [1, 2, 3, 4]
    assert [*state.open(table, 0, 6 * N + 1, Buffers(6 * N + 1), as_steps=False).quantized] == kept
