"""The contract of a kind of state: what the store keeps of sequences for a group of layers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from polarlm.engine.backends.kv import Buffer, FilledBlocks
from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks
from polarlm.engine.state.tables import BlockTable, Reservation


@dataclass
class Buffers:
    """The buffers of a prompt, or of all prompts of a batch, by (KV heads, head dim, layers): groups of one shape share
    one for no layers, unless others read it. rows: of each buffer. layers: how many are sealed together, which have
    memory of their own in each buffer. first: the block of a buffer that the next prompt begins with."""

    rows: int
    layers: int = 1
    first: int = 0
    by_shape: dict[tuple[int, int, str, tuple[int, ...]], Buffer] = field(default_factory=dict)


BlockArrays = Mapping[tuple[int, str], np.ndarray]  # by layer and name


class LayerState(Protocol):
    """The state of layers that share block tables. A sequence has one table in each group.

    A block of N tokens has a number in its sequence and an id in one of two allocators: `full` for blocks as they were
    computed, `quantized` for complete blocks that are old. New tokens are added by a reservation:

        reservation = state.open(table, start, count, …)   or open_step: reserves blocks, or raises OutOfBlocks
        state.begin, …, state.seal                         for all layers of a prompt, one by one or some together
        state.commit(table, reservation, length)           or state.abort(reservation): the table is as before
    """

    layers: tuple[int, ...]
    quantized: BlockAllocator
    full: BlockAllocator
    recent_blocks: int
    """How many of a sequence's newest complete blocks are in full precision, where there is room."""
    is_sparse: bool
    """Whether a quantized block stands for all tokens before its end, and only some complete blocks have one."""

    def new_table(self) -> BlockTable:
        """Return the table of an empty sequence."""

    def open(self, table: BlockTable, start: int, count: int, buffers: Buffers, *, as_steps: bool) -> Reservation:
        """Reserve blocks for a prompt's `count` tokens from position `start`, and a buffer that its layers write to. If
        it raises OutOfBlocks, nothing has changed.

        buffers: the span's buffers so far, to use or to add to. as_steps: see `KVStore.open`.
        """

    def open_step(self, table: BlockTable, start: int, count: int) -> Reservation:
        """Reserve blocks for the `count` rows of a step. Any number of rows may be kept. Otherwise like `open`. A
        sparse state takes no more rows than fit into the current block."""

    def view(
        self, layer: int, table: BlockTable, reservation: Reservation, start: int, rows: slice, position: int
    ) -> Any:
        """Return a view of `rows` of a span, for `spans`. start, position: of the span's first token and first row."""

    def spans(self, views: Sequence[Any]) -> Any:
        """Return the views of a step, or of a part of a prompt, in the form that the ops of these layers take."""

    def cache(self, layer: int) -> Any:
        """Return what the ops of one layer read and write: a `Cache` for attention, else arrays on the device."""

    def begin(self, layers: Sequence[int], table: BlockTable, reservation: Reservation, start: int) -> None:
        """Prepare a prompt's reservation for the rows of layers that are sealed together: one, unless they have K/V."""

    def seal(self, layers: Sequence[int], reservation: Reservation, start: int, count: int) -> Sequence[FilledBlocks]:
        """Keep what these layers of a prompt have appended, and return the blocks to encode."""

    def round_trip(self, layer: int, reservation: Reservation, start: int, count: int) -> None:
        """Encode and decode, in place, what a sealed layer attends to."""

    def filled_blocks(self, reservations: Sequence[tuple[Reservation, int]]) -> Sequence[FilledBlocks]:
        """Return the blocks that steps have made old, to be encoded before these are committed. reservations: with the
        length that each sequence will have."""

    def commit(self, table: BlockTable, reservation: Reservation, length: int) -> None:
        """Add `reservation` to a table whose sequence now has `length` tokens, and release blocks that are not
        needed."""

    def abort(self, reservation: Reservation) -> None:
        """Release what `reservation` reserved."""

    def release(self, table: BlockTable) -> None:
        """Release everything the table holds."""

    def keep_end(self, table: BlockTable, length: int) -> int | None:
        """Return a quantized block of the table that continues a sequence of `length` tokens, two blocks or more, that
        ends with a complete one. None if its blocks do so already, or if there is no room."""

    def plan_snapshots(self, table: BlockTable, start: int, stop: int) -> None:
        """Let the steps of a prompt from `start` to `stop` keep what a later prompt may continue from, as `open`
        does."""

    def first_visible(self, length: int) -> int:
        """Return the number of the first block that the token after `length` tokens, or a later one, can see."""

    def first_full(self, table: BlockTable, length: int) -> int:
        """Return the number of the first block in full precision of a sequence of `length` tokens, except the sink."""

    def reservation(self, table: BlockTable, length: int) -> Reservation:
        """Return the reservation of a step that changes no block of a sequence of `length` tokens."""

    def share(self, blocks: Sequence[int | None], recent: Sequence[int], length: int) -> BlockTable:
        """Return a table of `length` tokens with the complete blocks `blocks`, behind which the slots `recent` are, and
        add a reference to each."""

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of the slot `source` to the slot `target`."""

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        """Return the arrays of B quantized blocks: (B, …), with shapes and dtypes as in `StateShape.block_arrays`."""

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        """Write B quantized blocks, as `read_blocks` returns them. Raises ValueError for other arrays."""

    def read_full(self, slot: int, tokens: int) -> BlockArrays:
        """Return the arrays of the first `tokens` tokens of a slot, as in `StateShape.full_arrays`: copies or views."""

    def write_full(self, slot: int, arrays: BlockArrays) -> None:
        """Write a slot, with arrays as `read_full` returns them. Raises ValueError for other arrays."""

    def reserve_table(self, length: int, dropped: int, recent: int, *, with_sink: bool) -> BlockTable:
        """Reserve blocks for `length` tokens and return a table of them. If it raises, nothing has changed.

        dropped: the number of blocks that have left the window. recent: of recent blocks. Raises OutOfBlocks, or
        ValueError for numbers that do not fit together.
        """

    def bytes(self, table: BlockTable) -> int:
        """Return the bytes of the blocks that a table holds, shared ones included."""


@dataclass(eq=False)
class TableVersion:
    """A version of a sequence's block tables, which steps do not change until it has `end` tokens. Equal only to
    itself."""

    end: int


def table_version_after(groups: Sequence[LayerState], n: int, length: int) -> TableVersion:
    """Return the version of the tables after a step that has changed them, of a sequence that has `length` tokens now.
    A step changes them again that fills a block of `n` tokens, or with which a block leaves a window."""
    visible = [group.first_visible(length) for group in groups]
    ends = range((length // n + 1) * n - 1, length, -1) if length % n else ()
    return TableVersion(
        next((end for end in ends if [group.first_visible(end) for group in groups] == visible), length)
    )


def copy_slots(groups: Sequence[LayerState], slots: Sequence[int], count: int) -> list[int] | None:
    """Return copies of `slots`, one per group, with their first `count` tokens; None if no slot is free."""
    copies: list[int] = []
    try:
        for group in groups:
            copies += group.full.allocate()
        for group, target, source in zip(groups, copies, slots, strict=True):
            group.copy_full(target, source, count)
    except BaseException as error:
        for group, slot in zip(groups, copies, strict=False):
            group.full.release(slot)
        if isinstance(error, OutOfBlocks):
            return None
        raise
    return copies


def describe_layers(layers: Sequence[int], count: int) -> str:
    """Return the name of `layers`, in ascending order, of a model with `count` layers, such as "layers 0 to 3, 7"."""
    if len(layers) == count:
        return "all layers"
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    numbers = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(numbers)}"
