"""What states of recurrent layers share: slots for running sequences, and the rows of prompts.

A slot has the state at the start of a sequence's current block, and what each token of the block adds to it. So a
sequence can be cut anywhere in its current block, and rows that are not kept leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from polarlm.engine.backends.delta import SlotRows
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.state.layer_shapes import ArraySpec, RecurrentShape
from polarlm.engine.state.layer_state import BlockArrays
from polarlm.engine.state.tables import BlockTable, Reservation, TableGroup

F32 = np.dtype(np.float32)
Slot = Sequence[Array]  # the arrays of one slot, as in `RecurrentShape.full_arrays`
RowsOp = Callable[..., Array]  # `short_conv`, `gated_delta` or `mamba2` of a layer's ops


class PromptState(Protocol):
    """The state of a prompt in one layer."""

    def add(self, ops: Ops, op: RowsOp, inputs: Array, weights: Sequence[Any], position: int) -> Array:
        """Add rows from `position` on with the layer's op, and return what the op returns."""


class PromptSpan(NamedTuple):
    """Rows of a prompt from `position` on. prompts: by the ops of each GPU, the buffer of the prompt's reservation,
    for the layer that is being computed."""

    prompts: Mapping[Ops, PromptState]
    position: int


def add_rows(ops: Ops, op: RowsOp, inputs: Array, weights: Sequence[Any], slots: Any, spans: Any) -> Array:
    """Add rows to a layer's state with its op, one of `ops`, and return what the op returns. spans: from
    `RecurrentState.spans`, a step's rows on the device."""
    if isinstance(spans, PromptSpan):
        return spans.prompts[ops].add(ops, op, inputs, weights, spans.position)
    return op(inputs, *weights, SlotRows(slots, spans))


def first_tokens(arrays: Slot, slot: int, specs: Sequence[ArraySpec]) -> list[Array]:
    """Return one of the slots in `arrays`, cut to the shapes of `specs`, as views."""
    return [array[slot][tuple(map(slice, spec.shape))] for array, spec in zip(arrays, specs, strict=True)]


def assign_each(ops: Ops, targets: Slot, sources: Slot) -> None:
    for target, source in zip(targets, sources, strict=True):
        ops.assign(target, source)


class RecurrentState(TableGroup):
    """The part of a `LayerState` that concerns its slots.

    The arrays of its shape have the inputs of a convolution, called "inputs", last. The first `tokens` tokens of a
    slot's arrays are at the beginning of each axis.
    """

    def __init__(
        self, ops: Ops, shape: RecurrentShape, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]
    ) -> None:
        super().__init__(block_size, None, *blocks)
        self.layers = layers
        self._ops = ops
        self._specs, self._bytes = shape.full_arrays, (shape.quantized_bytes(block_size), shape.full_bytes(block_size))
        self._inputs_before = shape.full_arrays(0)[-1].shape[0]  # inputs of the convolution before the block
        self._slots: dict[int, Slot] = {
            layer: [
                ops.layer_ops(layer).to_device(np.zeros((blocks[1], *spec.shape), spec.dtype))
                for spec in shape.full_arrays(block_size)
            ]
            for layer in layers
        }

    def _slot(self, layer: int, slot: int, tokens: int) -> Slot:
        """Return what a slot has of the first `tokens` tokens of its block, as views."""
        return first_tokens(self._slots[layer], slot, self._specs(tokens))

    def view(
        self, layer: int, table: BlockTable, reservation: Reservation, start: int, rows: slice, position: int
    ) -> Any:
        if reservation.buffer is not None:
            return PromptSpan(reservation.buffer, position)
        return self._step_view(reservation, start, rows, position)

    def _step_view(self, reservation: Reservation, start: int, rows: slice, position: int) -> Any:
        raise NotImplementedError

    def spans(self, views: Sequence[Any]) -> np.ndarray | PromptSpan:
        """Return the rows of a prompt, or the rows of a step: int32 (…, 4), as the layers' op takes them."""
        if views and isinstance(views[0], PromptSpan):
            (rows,) = views
            return rows
        return self._step_rows(views)

    def _step_rows(self, views: Sequence[Any]) -> np.ndarray:
        raise NotImplementedError

    def round_trip(self, layer: int, reservation: Reservation, start: int, count: int) -> None:
        """Nothing: what the next tokens read is exact."""

    def filled_blocks(self, reservations: Sequence[tuple[Reservation, int]]) -> tuple[()]:
        return ()

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        for layer in self.layers:
            values = self._slot(layer, source, tokens)
            assign_each(self._ops.layer_ops(layer), self._slot(layer, target, tokens), values)

    def read_full(self, slot: int, tokens: int) -> BlockArrays:
        return {
            (layer, spec.name): self._ops.layer_ops(layer).to_host(array)
            for layer in self.layers
            for spec, array in zip(self._specs(tokens), self._slot(layer, slot, tokens), strict=True)
        }

    def write_full(self, slot: int, arrays: BlockArrays) -> None:
        for layer in self.layers:
            ops, tokens = self._ops.layer_ops(layer), len(arrays[layer, "inputs"]) - self._inputs_before
            sources = [ops.to_device(arrays[layer, spec.name]) for spec in self._specs(tokens)]
            assign_each(ops, self._slot(layer, slot, tokens), sources)

    def bytes(self, table: BlockTable) -> int:
        quantized, full = table.counts
        return len(self.layers) * (quantized * self._bytes[0] + full * self._bytes[1])
