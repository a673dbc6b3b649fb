"""The inputs of short convolutions in any order of prompts, steps, rejected rows and shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.recurrent.conv_inputs import ConvInputs, ConvShape
from polarlm.engine.state.recurrent.slots import PromptRows, add_rows
from polarlm.engine.state.tables import BlockTable

N, CHANNELS = 4, 2
TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=14)


class Schedules(RuleBasedStateMachine):
    """Sequences of tokens whose inputs are a function of the token; a result is the sum over the last `width`."""

    @initialize(width=st.integers(2, 4))
    def start(self, width: int) -> None:
        self.width, self.ops = width, NumpyOps(1)
        self.state = ConvInputs(self.ops, ConvShape(CHANNELS, width), N, (3, 5), (12, 8))
        self.conv = np.ones((width, CHANNELS), np.float32)
        self.sequences: list[tuple[list[int], BlockTable]] = []

    def inputs(self, tokens: Sequence[int], layer: int) -> np.ndarray:
        """[B | C | x] whose u is token · (1, 10 · layer)."""
        x = np.outer(tokens, [1, 10 * layer]).astype(np.float32)
        return np.concatenate([np.ones_like(x), np.ones_like(x), x], axis=1)

    def expected(self, tokens: Sequence[int], count: int, layer: int) -> np.ndarray:
        """The results of the last `count` tokens."""
        padded = np.array([0] * (self.width - 1) + list(tokens))
        sums = np.convolve(padded, np.ones(self.width, int), "valid")[-count:]
        return np.outer(sums, [1, 10 * layer]).astype(np.float32)

    def check(self, tokens: list[int], new: list[int], spans: np.ndarray | PromptRows, layer: int) -> None:
        inputs, ops, slots = self.inputs(new, layer), self.state._ops, self.state.cache(layer)
        results = add_rows(ops, ops.short_conv, inputs, (self.conv, None), slots, spans)
        np.testing.assert_array_equal(results, self.expected(tokens + new, len(new), layer))

    @rule()
    def begin(self) -> None:
        if len(self.sequences) < 3:
            self.sequences.append(([], BlockTable()))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), new=TOKENS, unit=st.integers(1, 6), aborts=st.booleans())
    def prompt(self, data: st.DataObject, new: list[int], unit: int, aborts: bool) -> None:
        tokens, table = data.draw(st.sampled_from(self.sequences))
        try:
            growth = self.state.open(table, len(tokens), len(new), {}, as_steps=False)
        except OutOfBlocks:
            return
        for layer in self.state.layers:
            self.state.begin_layer(layer, table, growth, len(tokens))
            for first in range(0, len(new), unit):
                part = slice(first, min(first + unit, len(new)))
                view = self.state.view(layer, table, growth, len(tokens), part, len(tokens) + first)
                self.check(tokens + new[:first], new[part], self.state.spans([view]), layer)
            self.state.seal(layer, growth, len(tokens), len(new))
        if aborts:
            self.state.abort(growth)
            return
        tokens += new
        self.state.commit(table, growth, len(tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), new=st.lists(st.integers(1, 9), min_size=1, max_size=6), kept=st.integers(0, 6))
    def step(self, data: st.DataObject, new: list[int], kept: int) -> None:
        tokens, table = data.draw(st.sampled_from(self.sequences))
        try:
            growth = self.state.open_step(table, len(tokens), len(new))
        except OutOfBlocks:
            return
        for layer in self.state.layers:
            view = self.state.view(layer, table, growth, len(tokens), slice(0, len(new)), len(tokens))
            self.check(tokens, new, self.state.spans([view]), layer)
        tokens += new[:kept]
        self.state.commit(table, growth, len(tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Begin another sequence with whole blocks of one, and in a copy with a part of its current block."""
        tokens, table = data.draw(st.sampled_from(self.sequences))
        count = data.draw(st.integers(0, len(tokens)))
        complete, rest = divmod(count, N)
        if len(self.sequences) == 3 or (rest and complete < len(tokens) // N):
            return
        blocks = [table.block(number) if number else table.sink for number in range(complete)]
        own = self.state.share(blocks, count)
        if rest:
            try:
                (own.current,) = self.state.full.allocate(1)
            except OutOfBlocks:
                self.state.release(own)
                return
            assert table.current is not None
            self.state.copy_full(own.current, table.current, rest)
        self.sequences.append((tokens[:count], own))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def moves(self, data: st.DataObject) -> None:
        """Blocks and slots that are read and written back into others are the same."""
        _, table = data.draw(st.sampled_from(self.sequences))
        try:
            if table.quantized:
                (block,) = self.state.quantized.allocate(1)
                self.state.write_blocks([block], self.state.read_blocks(table.quantized[-1:]))
                self.state.quantized.release(table.quantized[-1])
                table.quantized[-1] = block
            if table.current is not None:
                (slot,) = self.state.full.allocate(1)
                self.state.write_full(slot, self.state.read_full(table.current, N))
                self.state.full.release(table.current)
                table.current = slot
        except OutOfBlocks:
            pass

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.state.release(self.sequences.pop(index)[1])

    @invariant()
    def nothing_leaks(self) -> None:
        if getattr(self, "sequences", None) == []:
            assert self.state.quantized.free == 12
            assert self.state.full.free == 8


TestSchedules = Schedules.TestCase


def test_sizes_are_those_of_the_arrays() -> None:
    shape = ConvShape(CHANNELS, 3)
    state = shape.state(NumpyOps(1), N, (0,), (2, 3))
    assert state.read_blocks([0, 1])[0, "inputs"].nbytes == 2 * shape.quantized_bytes(N)
    assert state.cache(0).nbytes == 3 * shape.full_bytes(N)
    for arrays, specs in (
        (state.read_blocks([0]), shape.block_arrays(N, "fields")),
        (state.read_full(0, 3), shape.full_arrays(3)),
    ):
        ((_, name), array), (spec,) = next(iter(arrays.items())), specs
        assert (name, array.dtype) == (spec.name, spec.dtype)
        assert array.reshape(spec.shape).shape == spec.shape


def test_writing_arrays_of_another_shape_is_refused() -> None:
    state = ConvShape(CHANNELS, 3).state(NumpyOps(1), N, (0,), (2, 3))
    with pytest.raises(ValueError, match="broadcast"):
        state.write_blocks([0], {(0, "inputs"): np.zeros((1, 9, 9), np.float32)})
