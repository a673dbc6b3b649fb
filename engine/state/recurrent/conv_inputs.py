"""The state of short convolutions: the inputs of the current block, and of the last tokens before it.

A slot has the inputs of a block's tokens, after the inputs of the `width` − 1 tokens that its first token sees. A
complete block keeps the inputs that the first tokens of the next block see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polarlm.engine.backends.delta import SlotRows
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.state.layer_shapes import ArraySpec, RecurrentShape
from polarlm.engine.state.layer_state import BlockArrays, Buffers
from polarlm.engine.state.recurrent.slots import F32, RecurrentState, RowsOp
from polarlm.engine.state.tables import BlockTable, Reservation


@dataclass(frozen=True)
class ConvShape(RecurrentShape):
    """How one layer stores its inputs: `channels` float32 numbers a token, which sees `width` tokens. Every complete
    block is kept, so that a stored prefix can end with it."""

    channels: int
    width: int

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        return self.full_arrays(0)

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        return [ArraySpec("inputs", (self.width - 1 + tokens, self.channels), F32)]

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> ConvInputs:
        return ConvInputs(ops, self, block_size, layers, blocks)


@dataclass
class _Prompt:
    """See `PromptSpan`. last_inputs: of the newest tokens that the next one sees (before, channels). targets:
    number of a block → the arrays that keep inputs which its tokens see, beginning with the inputs of the tokens before
    the block."""

    block_size: int
    last_inputs: Array
    targets: Mapping[int, Sequence[Array]] = field(default_factory=dict)
    rows: Array | None = None  # as `Ops.short_conv` takes them, of the longest part until now

    def add(self, ops: Ops, op: RowsOp, inputs: Array, weights: Sequence[Any], position: int) -> Array:
        inputs_before, count = len(self.last_inputs), len(inputs)
        if self.rows is None or len(self.rows) < count:
            numbers = np.arange(count, dtype=np.int32)
            self.rows = ops.to_device(np.stack([np.ones_like(numbers), numbers, np.zeros_like(numbers), numbers], 1))
        memory = ops.empty((1, inputs_before + count, self.last_inputs.shape[1]))
        ops.assign(memory[0][:inputs_before], self.last_inputs)
        results = op(inputs, *weights, SlotRows(memory, self.rows[:count]))
        first, end = position - inputs_before, position + count  # positions of the tokens in `memory`
        for number in range(position // self.block_size, (end + inputs_before - 1) // self.block_size + 1):
            begin = number * self.block_size - inputs_before
            for target in self.targets.get(number, ()):
                low, high = max(first, begin), min(end, begin + len(target))
                if low < high:
                    ops.assign(target[low - begin : high - begin], memory[0][low - first : high - first])
        ops.assign(self.last_inputs, memory[0][count:])
        return results


class ConvInputs(RecurrentState):
    """A `LayerState`."""

    def __init__(
        self, ops: Ops, shape: ConvShape, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]
    ) -> None:
        super().__init__(ops, shape, block_size, layers, blocks)
        zeros = np.zeros((self._inputs_before, shape.channels), np.float32)
        ends = blocks[0], *zeros.shape
        self._ends = {layer: ops.layer_ops(layer).to_device(np.zeros(ends, np.float32)) for layer in layers}
        self._zeros = {device: device.to_device(zeros) for device in dict.fromkeys(map(ops.layer_ops, layers))}

    def cache(self, layer: int) -> Array:
        """The slots of one layer, float32 (slots, before + block size, channels)."""
        return self._slots[layer][0]

    # -- growing -----------------------------------------------------------------------------------------------

    def open(self, table: BlockTable, start: int, count: int, buffers: Buffers, *, as_steps: bool) -> Reservation:
        prompts = {ops: _Prompt(self.block_size, ops.empty(inputs.shape)) for ops, inputs in self._zeros.items()}
        reservation = self.grow(table, start, count)
        reservation.buffer = prompts
        return reservation

    def open_step(self, table: BlockTable, start: int, count: int) -> Reservation:
        """Reserve slots, and copy to new ones what their first rows see of the block before."""
        reservation, last_slot = super().open_step(table, start, count), None
        for number, slot in reservation.slots.items():
            if slot != table.current:
                for layer in self.layers:
                    slots = self.cache(layer)
                    last = self._end(layer, table, number) if last_slot is None else slots[last_slot][self.block_size :]
                    self._ops.layer_ops(layer).assign(slots[slot][: self._inputs_before], last)
            last_slot = slot
        return reservation

    def _end(self, layer: int, table: BlockTable, number: int) -> Array:
        """Return the inputs that the first token of block `number` sees, where the block before it is complete."""
        if number == 0:
            return self._zeros[self._ops.layer_ops(layer)]
        if number == 1:
            assert table.sink is not None
            return self.cache(layer)[table.sink][self.block_size :]
        block = table.block(number - 1)
        assert block is not None
        return self._ends[layer][block]

    def _step_view(self, reservation: Reservation, start: int, rows: slice, position: int) -> np.ndarray:
        count, n = rows.stop - rows.start, self.block_size
        positions = np.arange(position, position + count)
        slots = np.array([reservation.slots.get(number, -1) for number in range(start // n, positions[-1] // n + 2)])
        block = positions // n - start // n
        index = np.empty((count, 4), np.int32)
        index[:, 0], index[:, 1] = 1 + slots[block], positions % n
        index[:, 2], index[:, 3] = 1 + slots[block + 1], range(count)
        return index

    def _step_rows(self, views: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty((0, 4), np.int32), *views])

    def begin(self, layers: Sequence[int], table: BlockTable, reservation: Reservation, start: int) -> None:
        if reservation.buffer is None:
            return
        (layer,) = layers
        (number, filled), slots = divmod(start, self.block_size), self.cache(layer)
        if filled:
            assert table.current is not None
            last = slots[table.current][filled : filled + self._inputs_before]
        else:
            last = self._end(layer, table, number)
        targets = {number + 1: [self._ends[layer][block]] for number, block in reservation.quantized.items()}
        for number, slot in reservation.slots.items():
            targets.setdefault(number, []).append(slots[slot])
        ops = self._ops.layer_ops(layer)
        ops.assign(reservation.buffer[ops].last_inputs, last)
        reservation.buffer[ops].targets = targets

    def seal(self, layers: Sequence[int], reservation: Reservation, start: int, count: int) -> tuple[()]:
        """Nothing: what blocks keep is written as it is computed."""
        return ()

    def commit(self, table: BlockTable, reservation: Reservation, length: int) -> None:
        if reservation.buffer is None:
            for block, slot in self.filled_slots(reservation, length):
                for layer, ends in self._ends.items():
                    self._ops.layer_ops(layer).assign(ends[block], self.cache(layer)[slot][self.block_size :])
        super().commit(table, reservation, length)

    # -- blocks on the host ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        layer_ops = self._ops.layer_ops
        return {
            (layer, "inputs"): np.stack([layer_ops(layer).to_host(ends[block]) for block in blocks])
            for layer, ends in self._ends.items()
        }

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        for layer, ends in self._ends.items():
            for block, inputs in zip(blocks, arrays[layer, "inputs"], strict=True):
                ops = self._ops.layer_ops(layer)
                ops.assign(ends[block], ops.to_device(inputs))
