"""The state of recurrent layers in any order of prompts, steps, rejected rows, aborts, preemptions, snapshots and
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
from polarlm.engine.state.layer_state import BlockArrays
from polarlm.engine.state.recurrent.delta import DeltaShape, DeltaState, DeltaTable, ends_to_keep
from polarlm.engine.state.recurrent.slots import add_rows
from polarlm.model_loaders.config import GatedDelta, Mamba2, Recurrent
from tests.recurrence import Weights, make_rows, make_weights, recurrence

N = 4
GATED_DELTA, MAMBA2 = GatedDelta(1, 2, 4, 3, 3), Mamba2(1, 2, 4, 3, 3)


@dataclass
class Running:
    """A sequence: its rows, and for each layer what it began with at position `base`, a multiple of N."""

    rows: np.ndarray
    table: DeltaTable
    base: int = 0
    start: dict[int, tuple[np.ndarray, np.ndarray]] | None = None


class Schedules(RuleBasedStateMachine):
    """Sequences whose results are those of the recurrence from the beginning, or from the snapshot they began with."""

    @initialize(seed=st.integers(0, 99), shape=st.sampled_from([GATED_DELTA, MAMBA2]))
    def start(self, seed: int, shape: Recurrent) -> None:
        self.rng, self.ops, self.shape = np.random.default_rng(seed), NumpyOps(1), shape
        self.op: Any = self.ops.mamba2 if shape is MAMBA2 else self.ops.gated_delta
        self.state = DeltaState(self.ops, DeltaShape(shape), N, (3, 5), (6, 5))
        self.weights = {layer: make_weights(self.rng, shape) for layer in self.state.layers}
        self.running: list[Running] = []
        self.waiting: list[tuple[Running, BlockArrays]] = []

    def add(self, view: Any, rows: np.ndarray, layer: int) -> np.ndarray:
        """Add rows to the state, and return the op's results."""
        spans, slots = self.state.spans([view]), self.state.cache(layer)
        return add_rows(self.state._ops, self.op, rows, (self.weights[layer],), slots, spans)

    def check(self, one: Running, rows: np.ndarray, found: np.ndarray, layer: int, w: Weights) -> None:
        """Whether `found` are the results of the last rows of a sequence."""
        wanted, _ = recurrence(rows[one.base :], w, self.shape, one.start and one.start[layer])
        wanted = wanted[len(wanted) - len(found) :]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * max(1, np.abs(wanted).max()))

    @rule()
    def begin(self) -> None:
        if len(self.running) < 3:
            self.running.append(Running(make_rows(self.rng, self.shape, 0), self.state.new_table()))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 25), unit=st.integers(1, 9), aborts=st.booleans())
    def prompt(self, data: st.DataObject, count: int, unit: int, aborts: bool) -> None:
        one = data.draw(st.sampled_from(self.running))
        begin, rows = len(one.rows), np.concatenate([one.rows, make_rows(self.rng, self.shape, count)])
        try:
            growth = self.state.open(one.table, begin, count, {}, as_steps=False)
        except OutOfBlocks:
            return
        for layer, w in self.weights.items():
            self.state.begin_layer(layer, one.table, growth, begin)
            for first in range(0, count, unit):
                part = slice(first, min(first + unit, count))
                view = self.state.view(layer, one.table, growth, begin, slice(0, part.stop - first), begin + first)
                end = begin + part.stop
                results = self.add(view, rows[begin + first : end], layer)
                self.check(one, rows[:end], results, layer, w)
            self.state.seal(layer, growth, begin, count)
        if aborts:
            self.state.abort(growth)
            return
        one.rows = rows
        self.state.commit(one.table, growth, len(rows))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, N), kept=st.integers(0, N))
    def step(self, data: st.DataObject, count: int, kept: int) -> None:
        one = data.draw(st.sampled_from(self.running))
        begin = len(one.rows)
        count = min(count, N - begin % N)
        rows = np.concatenate([one.rows, make_rows(self.rng, self.shape, count)])
        try:
            growth = self.state.open_step(one.table, begin, count)
        except OutOfBlocks:
            return
        for layer, w in self.weights.items():
            view = self.state.view(layer, one.table, growth, begin, slice(0, count), begin)
            self.check(one, rows, self.add(view, rows[begin:], layer), layer, w)
        one.rows = rows[: begin + min(kept, count)]
        self.state.commit(one.table, growth, len(one.rows))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begin_with_a_snapshot(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        if len(self.running) == 3 or not one.table.snapshots:
            return
        number, block = data.draw(st.sampled_from(sorted(one.table.snapshots.items())))
        end = (number + 1) * N
        table = self.state.share([None] * number + [block], end)
        found = self.state.read_blocks([block])
        start = {}
        for layer, w in self.weights.items():
            kept = {name: array[0] for (own, name), array in found.items() if own == layer}
            decoded = EIGHT_BITS.decode(kept)
            before = one.start and one.start[layer]
            if end > one.base:
                exact = recurrence(one.rows[one.base : end], w, self.shape, before)[1][-1]
                assert (np.abs(decoded - exact) <= 0.51 * kept["scales"][:, None] + 1e-5).all()
            start[layer] = decoded, kept["inputs"]
        self.running.append(Running(one.rows[:end], table, end, start))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begin_with_a_copy(self, data: st.DataObject) -> None:
        """A copy of a sequence that is cut anywhere in its current block."""
        one = data.draw(st.sampled_from(self.running))
        if len(self.running) == 3 or one.table.current is None:
            return
        length = data.draw(st.integers(len(one.rows) // N * N, len(one.rows)))
        try:
            (slot,) = self.state.full.allocate(1)
        except OutOfBlocks:
            return
        self.state.copy_full(slot, one.table.current, length % N)
        self.running.append(Running(one.rows[:length], DeltaTable(current=slot), one.base, one.start))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def keep_the_end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        if len(one.rows) >= 2 * N and len(one.rows) % N == 0:
            block = self.state.keep_end(one.table, len(one.rows))
            assert block is not None or not self.state.quantized.free

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def moves(self, data: st.DataObject) -> None:
        """Slots and snapshots that are read and written back into others are the same."""
        table = data.draw(st.sampled_from(self.running)).table
        try:
            for number, block in table.snapshots.items():
                (other,) = self.state.quantized.allocate(1)
                self.state.write_blocks([other], self.state.read_blocks([block]))
                self.state.quantized.release(block)
                table.snapshots[number] = other
            if table.current is not None:
                (slot,) = self.state.full.allocate(1)
                self.state.write_full(slot, self.state.read_full(table.current, N))
                self.state.full.release(table.current)
                table.current = slot
        except OutOfBlocks:
            pass

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A sequence gives up its slot; what it knew waits outside."""
        index = data.draw(st.integers(0, len(self.running) - 1))
        one = self.running[index]
        if one.table.current is not None and len(one.rows):
            del self.running[index]
            arrays = self.state.read_full(one.table.current, len(one.rows) % N)
            self.waiting.append((one, {key: array.copy() for key, array in arrays.items()}))
            self.state.release(one.table)

    @precondition(lambda self: self.waiting and len(self.running) < 3)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.waiting) - 1))
        one, saved = self.waiting[index]
        try:
            one.table = self.state.reserve_table(len(one.rows), max(0, len(one.rows) // N - 1), False)
        except OutOfBlocks:
            return
        assert one.table.current is not None
        self.state.write_full(one.table.current, saved)
        self.running.append(one)
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


def test_schedules() -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=20))


@pytest.mark.slow
def test_many_schedules() -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=100))


def test_a_prompt_keeps_its_end_and_ever_fewer_places_before_it() -> None:
    assert ends_to_keep(0, 2, None) == [1]
    assert ends_to_keep(0, 1, None) == []  # the first block is computed again
    assert ends_to_keep(20, 300, 24) == [24, 43, 235, 283, 295, 299]
    assert ends_to_keep(20, 300, 7) == [43, 235, 283, 295, 299]  # another span has computed that block
