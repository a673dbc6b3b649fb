"""What the store keeps of sequences for the layers of one group: the contract of a kind of state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from polarlm.engine.backends.kv import Buffer, Cache, FilledBlocks
from polarlm.engine.state.blocks import BlockAllocator
from polarlm.engine.state.tables import BlockTable, Growth

Buffers = dict[tuple[int, int], Buffer]  # of one span, by heads and channels: groups of one shape share a buffer

BlockArrays = Mapping[tuple[int, str], np.ndarray]  # by layer and name


class LayerState(Protocol):
    """The state of layers that share block tables. A sequence has one table in each group.

    Blocks of N tokens have numbers in their sequence, and ids in one of two allocators: `full` for what is as it was
    computed, `quantized` for complete blocks as they are kept. New tokens go through a growth:

        growth = state.open(table, start, count, …)      or open_step: reserves blocks, or raises OutOfBlocks
        state.begin_layer, …, state.seal                 for every layer of a prompt
        state.commit(table, growth, length)              or state.abort(growth), after which the table is as it was
    """

    layers: tuple[int, ...]
    quantized: BlockAllocator
    full: BlockAllocator
    can_cut: bool
    """Whether the first tokens of a full-precision block can be used without those that follow them."""

    def open(self, table: BlockTable, start: int, count: int, buffers: Buffers, *, as_steps: bool) -> Growth:
        """Reserve blocks for a prompt's `count` tokens from position `start`, and what its layers write to meanwhile.

        Raises OutOfBlocks and changes nothing. buffers: of the span so far. as_steps: see `KVStore.open`.
        """

    def open_step(self, table: BlockTable, start: int, count: int) -> Growth:
        """Reserve blocks for the `count` rows of a step, any number of which may be kept. As `open` otherwise."""

    def view(self, layer: int, table: BlockTable, growth: Growth, start: int, rows: slice, position: int) -> Any:
        """`rows`, which begin at `position`, of a span that begins at `start`: an element of `spans`."""

    def spans(self, views: Sequence[Any]) -> Any:
        """What the ops of these layers get for several views: those of a step, or of a part of a prompt."""

    def cache(self, layer: int) -> Cache:
        """What the ops of one layer read and write."""

    def begin_layer(self, layer: int, table: BlockTable, growth: Growth, start: int) -> None:
        """Make a prompt's growth ready for a layer's rows."""

    def seal(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Keep what a layer of a prompt has appended. Raises EngineError ("model_damaged") where it is not finite."""

    def round_trip(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Replace what a sealed layer attends to by what it is after encoding and decoding."""

    def filled_blocks(self, growths: Sequence[tuple[Growth, int]]) -> FilledBlocks | None:
        """The blocks that steps have filled, which are encoded before the steps are committed; None if there are none.

        growths: of steps, each with the tokens that its sequence will have.
        """

    def commit(self, table: BlockTable, growth: Growth, length: int) -> None:
        """Add `growth` to a table whose sequence has `length` tokens now, and release what these do not need."""

    def abort(self, growth: Growth) -> None:
        """Release what `growth` reserved."""

    def release(self, table: BlockTable) -> None:
        """Release everything the table holds."""

    def first_visible(self, length: int) -> int:
        """The number of the first block that the token after `length` tokens, or a later one, can see."""

    def share(self, blocks: Sequence[int | None], length: int) -> BlockTable:
        """A table of `length` tokens whose complete blocks are `blocks`, with one more reference to each."""

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a full-precision block."""

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        """The arrays of B quantized blocks, (B, …) of the shapes of `StateShape.block_arrays`."""

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        """Write B quantized blocks. Raises ValueError for arrays that are not such blocks."""

    def read_full(self, slot: int, tokens: int) -> BlockArrays:
        """The arrays of the first `tokens` tokens of a full-precision block."""

    def write_full(self, slot: int, arrays: BlockArrays) -> None:
        """Write a full-precision block. Raises ValueError as `write_blocks`."""

    def reserve_table(self, length: int, dropped: int, with_sink: bool) -> BlockTable:
        """A table with empty blocks for `length` tokens, of which `dropped` quantized blocks have left the window.

        Raises OutOfBlocks or ValueError and changes nothing.
        """

    def bytes(self, table: BlockTable) -> int:
        """Bytes of the blocks that a table holds, shared ones included."""
