"""The state of short convolutions: the inputs of the current block, and of the last tokens before it.

A slot has the inputs of a block's tokens, and before them those of the `width` − 1 tokens that its first token sees. A
complete block keeps the inputs that the first tokens of the next block see. So a sequence can be cut anywhere in its
current block, and rows that are not kept leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.state.layer_shapes import ArraySpec, TokenBlocks
from polarlm.engine.state.layer_state import BlockArrays, Buffers
from polarlm.engine.state.tables import BlockTable, Growth, TableGroup

_F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class ConvShape(TokenBlocks):
    """How one layer stores its inputs, of `channels` float32 numbers a token. width: tokens that a token sees."""

    channels: int
    width: int
    window: None = None  # every complete block is kept, so that any of them can be the end of a stored prefix
    values: int = 0  # of K/V

    @property
    def group(self) -> Hashable:
        return type(self), self.channels, self.width

    def quantized_bytes(self, block_size: int) -> int:
        return _F32.itemsize * self.channels * (self.width - 1)

    def full_bytes(self, block_size: int) -> int:
        return _F32.itemsize * self.channels * (self.width - 1 + block_size)

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        return [ArraySpec("inputs", (self.width - 1, self.channels), _F32)]

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        return [ArraySpec("inputs", (self.width - 1 + tokens, self.channels), _F32)]

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> ConvInputs:
        return ConvInputs(ops, self, block_size, layers, blocks)


@dataclass
class _Prompt:
    """The growth of a prompt on a card, in the layer that is being computed.

    last: the inputs of the newest `before` tokens (before, channels). targets: number of a block → the arrays that keep
    inputs which its tokens see, those of the `before` tokens before it first.
    """

    position: int  # of the next token
    last: Array
    targets: Mapping[int, Sequence[Array]] = field(default_factory=dict)

    def add(self, ops: Ops, inputs: Array, before: int, block_size: int) -> None:
        """Keep the inputs of further tokens, which follow the newest `before` ones (before + tokens, channels)."""
        first, end = self.position - before, self.position - before + len(inputs)  # positions
        for number in range(self.position // block_size, (end + before - 1) // block_size + 1):
            begin = number * block_size - before
            for target in self.targets.get(number, ()):
                low, high = max(first, begin), min(end, begin + len(target))
                if low < high:
                    ops.assign(target[low - begin : high - begin], inputs[low - first : high - first])
        ops.assign(self.last, inputs[len(inputs) - before :])
        self.position = end


class _View(NamedTuple):
    """Rows of a span; see `LayerState.view`."""

    growth: Mapping[Ops, _Prompt] | None  # by the ops of the card; None for a step
    rows: np.ndarray  # int32 (rows, 4), as in `Ops.short_conv`


@dataclass
class PromptInputs:
    """Rows of prompts, in the form that `ShortConv` takes. ops: those of the layer."""

    _rows: np.ndarray
    _spans: Sequence[tuple[Mapping[Ops, _Prompt], int]]  # growths, and how many rows they have here
    _before: int  # inputs before the first
    _block_size: int
    _on_cards: dict[Ops, Array] = field(default_factory=dict)

    def rows(self, ops: Ops) -> Array:
        """Return int32 (T, 4) of `memory`, which has a slot for each span; see `Ops.short_conv`."""
        if ops not in self._on_cards:
            self._on_cards[ops] = ops.to_device(self._rows)
        return self._on_cards[ops]

    def memory(self, ops: Ops) -> Array:
        """Return slots with the inputs before these rows: float32 (spans, before + rows, channels)."""
        rows = self._before + max(count for _, count in self._spans)
        memory = ops.empty((len(self._spans), rows, self._spans[0][0][ops].last.shape[1]))
        for number, (growth, _) in enumerate(self._spans):
            ops.assign(memory[number][: self._before], growth[ops].last)
        return memory

    def keep(self, ops: Ops, memory: Array) -> None:
        """Keep what these rows have added to `memory`."""
        for number, (growth, count) in enumerate(self._spans):
            growth[ops].add(ops, memory[number][: self._before + count], self._before, self._block_size)


class ConvInputs(TableGroup):
    """A `LayerState`."""

    can_cut = True

    def __init__(
        self, ops: Ops, shape: ConvShape, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]
    ) -> None:
        super().__init__(block_size, None, *blocks)
        self.layers = layers
        self._ops, self._shape, self._before = ops, shape, shape.width - 1
        quantized, full = blocks
        self._ends, self._slots = (
            {
                layer: ops.of_layer(layer).to_device(np.zeros((count, rows, shape.channels), np.float32))
                for layer in layers
            }
            for count, rows in ((quantized, self._before), (full, self._before + block_size))
        )
        nothing = np.zeros((self._before, shape.channels), np.float32)
        self._nothing = {own: own.to_device(nothing) for own in dict.fromkeys(map(ops.of_layer, layers))}

    def cache(self, layer: int) -> Array:
        """The slots of one layer, float32 (slots, before + block size, channels)."""
        return self._slots[layer]

    # -- growing -----------------------------------------------------------------------------------------------

    def open(self, table: BlockTable, start: int, count: int, buffers: Buffers, *, as_steps: bool) -> Growth:
        shape = self._before, self._shape.channels
        prompts = {ops: _Prompt(start, ops.empty(shape)) for ops in self._nothing}
        growth = self.grow(table, start, count)
        growth.buffer = prompts
        return growth

    def open_step(self, table: BlockTable, start: int, count: int) -> Growth:
        """Reserve slots, and copy to new ones what their first rows see of the block before."""
        growth, n = self.grow_in_place(table, start, count), self.block_size
        before = None
        for number, slot in growth.slots.items():
            if slot != table.current:
                for layer, slots in self._slots.items():
                    last = self._end(layer, table, number) if before is None else slots[before][n:]
                    self._ops.of_layer(layer).assign(slots[slot][: self._before], last)
            before = slot
        return growth

    def _end(self, layer: int, table: BlockTable, number: int) -> Array:
        """The inputs that the first token of block `number` sees, where the block before it is complete."""
        if number == 0:
            return self._nothing[self._ops.of_layer(layer)]
        if number == 1:
            assert table.sink is not None
            return self._slots[layer][table.sink][self.block_size :]
        block = table.block(number - 1)
        assert block is not None
        return self._ends[layer][block]

    def view(self, layer: int, table: BlockTable, growth: Growth, start: int, rows: slice, position: int) -> _View:
        count, n = rows.stop - rows.start, self.block_size
        index = np.zeros((count, 4), np.int32)
        if growth.buffer is None:
            places = np.arange(position, position + count)
            slots = np.array([growth.slots.get(number, -1) for number in range(start // n, places[-1] // n + 2)])
            block = places // n - start // n
            index[:, 0], index[:, 1], index[:, 2] = 1 + slots[block], places % n, 1 + slots[block + 1]
        else:
            index[:, 1] = np.arange(count)
        index[:, 3] = np.arange(count)
        return _View(growth.buffer, index)

    def spans(self, views: Sequence[_View]) -> np.ndarray | PromptInputs:
        if not views or views[0].growth is None:
            return np.concatenate([np.empty((0, 4), np.int32), *(view.rows for view in views)])
        for number, view in enumerate(views):
            view.rows[:, 0] = 1 + number
        spans = [(view.growth, len(view.rows)) for view in views if view.growth is not None]
        return PromptInputs(np.concatenate([view.rows for view in views]), spans, self._before, self.block_size)

    def begin_layer(self, layer: int, table: BlockTable, growth: Growth, start: int) -> None:
        if growth.buffer is None:
            return
        (number, filled), slots = divmod(start, self.block_size), self._slots[layer]
        if filled:
            assert table.current is not None
            last = slots[table.current][filled : filled + self._before]
        else:
            last = self._end(layer, table, number)
        targets = {number + 1: [self._ends[layer][block]] for number, block in growth.quantized.items()}
        for number, slot in growth.slots.items():
            targets.setdefault(number, []).append(slots[slot])
        ops = self._ops.of_layer(layer)
        prompt = growth.buffer[ops]
        ops.assign(prompt.last, last)
        prompt.position, prompt.targets = start, targets

    def seal(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Nothing: what blocks keep is written as it is computed."""

    def round_trip(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Nothing: inputs are not coded."""

    def filled_blocks(self, growths: Sequence[tuple[Growth, int]]) -> tuple[()]:
        return ()

    def commit(self, table: BlockTable, growth: Growth, length: int) -> None:
        if growth.buffer is None:
            for block, slot in self.filled(growth, length):
                for layer in self.layers:
                    last = self._slots[layer][slot][self.block_size :]
                    self._ops.of_layer(layer).assign(self._ends[layer][block], last)
        super().commit(table, growth, length)

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        for layer, slots in self._slots.items():
            copied = slots[source][: self._before + tokens]
            self._ops.of_layer(layer).assign(slots[target][: self._before + tokens], copied)

    # -- blocks on the host ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        of_layer = self._ops.of_layer
        return {
            (layer, "inputs"): np.stack([of_layer(layer).to_host(ends[block]) for block in blocks])
            for layer, ends in self._ends.items()
        }

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        for layer, ends in self._ends.items():
            for block, inputs in zip(blocks, arrays[layer, "inputs"], strict=True):
                ops = self._ops.of_layer(layer)
                ops.assign(ends[block], ops.to_device(inputs))

    def read_full(self, slot: int, tokens: int) -> BlockArrays:
        rows = self._before + tokens
        of_layer = self._ops.of_layer
        return {(layer, "inputs"): of_layer(layer).to_host(slots[slot][:rows]) for layer, slots in self._slots.items()}

    def write_full(self, slot: int, arrays: BlockArrays) -> None:
        for layer, slots in self._slots.items():
            ops, given = self._ops.of_layer(layer), arrays[layer, "inputs"]
            ops.assign(slots[slot][: len(given)], ops.to_device(given))

    def bytes(self, table: BlockTable) -> int:
        full = (table.sink is not None) + (table.current is not None)
        size = self.block_size
        each = full * self._shape.full_bytes(size) + len(table.quantized) * self._shape.quantized_bytes(size)
        return len(self.layers) * each
