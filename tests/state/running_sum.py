"""A second kind of mixer and of state, as small as they can be: a layer that adds a function of the sum of its inputs.

A sum cannot be cut: it is known at the ends of blocks, and where a sequence ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.model.layers import Eps
from polarlm.engine.state.layer_shapes import ArraySpec, TokenBlocks
from polarlm.engine.state.layer_state import BlockArrays
from polarlm.engine.state.tables import BlockTable, Growth, TableGroup
from polarlm.model_loaders.config import Mixer


@dataclass(frozen=True)
class RunningSum(Mixer):
    """In a configuration."""

    size: int  # E


@dataclass(frozen=True)
class SumShape(TokenBlocks):
    """Of a layer's state: a sum for each block."""

    size: int
    window: int  # of one block: the next token sees the end of the last complete one alone
    values: int = 0

    @property
    def group(self) -> Hashable:
        return type(self), self.size

    def quantized_bytes(self, block_size: int) -> int:
        return 8 * self.size

    def full_bytes(self, block_size: int) -> int:
        return 8 * self.size

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        return [ArraySpec("sums", (self.size,), np.dtype(np.float64))]

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        return self.block_arrays(tokens, "")

    def state(self, ops: Any, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> Sums:
        return Sums(self.size, block_size, layers, blocks)


@dataclass
class Pending:
    """The sums after each row of a span, which starts at `start`, for each layer: parts in order, float64 (T, E)."""

    start: int
    sums: dict[int, list[np.ndarray]] = field(default_factory=dict)


class View(NamedTuple):
    rows: slice
    table: BlockTable
    pending: Pending


class Sums(TableGroup):
    """The state: sums at the ends of complete blocks, and in slots at the end of a sequence."""

    can_cut = False

    def __init__(self, size: int, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]):
        super().__init__(block_size, block_size, *blocks)
        self.layers = layers
        self.kept, self.slots = ({layer: np.full((count, size), np.nan) for layer in layers} for count in blocks)

    def cache(self, layer: int) -> tuple[Sums, int]:
        return self, layer

    def at(self, layer: int, table: BlockTable, length: int) -> np.ndarray:
        """The sum (E,) after the `length` tokens of a sequence."""
        complete, rest = divmod(length, self.block_size)
        if rest:
            return self.slots[layer][table.current]
        if complete > 1:
            return self.kept[layer][table.block(complete - 1)]
        return self.slots[layer][table.sink] if complete else np.zeros(self.slots[layer].shape[1])

    def open(self, table: BlockTable, start: int, count: int, buffers: Any, *, as_steps: bool) -> Growth:
        growth = self.grow(table, start, count)
        growth.buffer = Pending(start)
        return growth

    def open_step(self, table: BlockTable, start: int, count: int) -> Growth:
        growth = self.grow_in_place(table, start, count)
        growth.buffer = Pending(start)
        return growth

    def view(self, layer: int, table: BlockTable, growth: Growth, start: int, rows: slice, position: int) -> View:
        return View(rows, table, growth.buffer)

    def spans(self, views: Sequence[View]) -> Sequence[View]:
        return views

    def begin_layer(self, layer: int, table: BlockTable, growth: Growth, start: int) -> None:
        """Nothing is copied: the sum that a span starts from stays as it is until commit."""

    def seal(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Nothing: sums are kept when they are committed."""

    def round_trip(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Nothing: sums are exact."""

    def filled_blocks(self, growths: Sequence[tuple[Growth, int]]) -> tuple[()]:
        return ()

    def commit(self, table: BlockTable, growth: Growth, length: int) -> None:
        pending, n = growth.buffer, self.block_size
        for layer, parts in pending.sums.items():
            sums = np.concatenate(parts)
            for kept, blocks in ((self.kept, growth.quantized), (self.slots, growth.slots)):
                for number, block in blocks.items():
                    end = min((number + 1) * n, length)
                    if end > max(pending.start, number * n):
                        kept[layer][block] = sums[end - 1 - pending.start]
        super().commit(table, growth, length)

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        for slots in self.slots.values():
            slots[target] = slots[source]

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        return {(layer, "sums"): self.kept[layer][blocks] for layer in self.layers}

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        for layer in self.layers:
            self.kept[layer][blocks] = arrays[layer, "sums"]

    def read_full(self, slot: int, tokens: int) -> BlockArrays:
        return {(layer, "sums"): self.slots[layer][slot] for layer in self.layers}

    def write_full(self, slot: int, arrays: BlockArrays) -> None:
        for layer in self.layers:
            self.slots[layer][slot] = arrays[layer, "sums"]

    def bytes(self, table: BlockTable) -> int:
        blocks = len(table.quantized) + (table.sink is not None) + (table.current is not None)
        return sum(8 * self.slots[layer].shape[1] * blocks for layer in self.layers)


@dataclass(frozen=True)
class NoWeights:
    @classmethod
    def read(cls, read: Any) -> NoWeights:
        return cls()


class SumMixer:
    """x += tanh(sum of the inputs so far) / 8."""

    Weights = NoWeights

    def __init__(self, ops: Any, shape: RunningSum, eps: Eps, weights: NoWeights, cache: Any, transform: None):
        self._state, self._layer = cache

    @staticmethod
    def state_shape(shape: RunningSum, block_size: int) -> SumShape:
        return SumShape(shape.size, block_size)

    def project(
        self, x: np.ndarray, rope: None, spans: Sequence[View], *, adapters: Any, recorded: bool, tap: Any = None
    ) -> Any:
        sums = np.empty(x.shape, np.float64)
        for rows, table, pending in spans:
            parts = pending.sums.setdefault(self._layer, [])
            before = parts[-1][-1] if parts else self._state.at(self._layer, table, pending.start)
            parts.append(np.cumsum([before, *x[rows].astype(np.float64)], axis=0)[1:])
            sums[rows] = parts[-1]
        return sums

    def mix(
        self, x: np.ndarray, sums: np.ndarray, spans: Any, *, adapters: Any, recorded: bool, tap: Any = None
    ) -> None:
        x += np.tanh(sums).astype(np.float32) / 8
