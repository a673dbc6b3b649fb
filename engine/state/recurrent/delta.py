"""The state of recurrent layers: a slot for each running sequence, and snapshots at the ends of some blocks.

A slot has the matrices at the start of the current block, and what each of its tokens adds (`backends.delta`), so a
sequence can be cut anywhere in its current block, and rows that are not kept leave nothing behind. When a block is
complete, its slot advances to the next one. A snapshot is a quantized block: it stands for all tokens before its end.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, FetchStates
from polarlm.engine.backends.ops import Ops
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS, SnapshotCodes
from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks
from polarlm.engine.state.layer_shapes import ArraySpec
from polarlm.engine.state.layer_state import BlockArrays, Buffers
from polarlm.engine.state.recurrent.delta_slots import (
    PromptRows,
    View,
    copy_slot,
    ends_to_keep,
    first_tokens,
    new_prompts,
    new_slots,
    one_slot,
)
from polarlm.engine.state.tables import BlockTable, Growth
from polarlm.model_loaders.config import Recurrent

_F32 = np.dtype(np.float32)
_SNAPSHOTS = 2  # for each slot


@dataclass(frozen=True)
class DeltaShape:
    """How one layer stores its state. codes: how snapshots keep its matrices. snapshots: their number; None: two for
    each slot."""

    mixer: Recurrent
    codes: SnapshotCodes = EIGHT_BITS
    snapshots: int | None = None
    window: None = None
    values: int = 0  # of K/V
    is_sparse: ClassVar[bool] = True

    @property
    def group(self) -> Hashable:
        return type(self), self.mixer

    def held_blocks(self, tokens: int, block_size: int) -> tuple[int, int]:
        return 0, int(tokens > 0)

    def needed_blocks(self, tokens: int, block_size: int) -> int:
        return 0

    def slots(self, full_slots: int, more: int) -> int:
        """One for each sequence, which has at least two of K/V, and a spare one; further ones are kept as snapshots."""
        return (full_slots + 1) // 2

    def more_blocks(self, full_slots: int, more: int) -> int:
        return _SNAPSHOTS * self.slots(full_slots + more, 0) if self.snapshots is None else self.snapshots

    def quantized_bytes(self, block_size: int) -> int:
        return _bytes(self.block_arrays(block_size, ""))

    def full_bytes(self, block_size: int) -> int:
        return _bytes(self.full_arrays(block_size))

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        one = self.mixer
        fields = self.codes.fields(one.key_dim, one.value_dim).items()
        return [
            *(ArraySpec(name, (one.value_heads, *shape), dtype) for name, (shape, dtype) in fields),
            ArraySpec("inputs", (one.width - 1, one.channels), np.dtype(np.float32)),
        ]

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        one = self.mixer
        shapes = DeltaSlots(
            matrices=(one.value_heads, one.key_dim, one.value_dim),
            keys=(one.key_heads, one.key_dim, tokens),
            updates=(one.value_heads, tokens, one.value_dim),
            decays=(one.value_heads, tokens),
            inputs=(one.width - 1 + tokens, one.channels),
        )
        return [ArraySpec(name, shape, _F32) for name, shape in shapes._asdict().items()]

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> DeltaState:
        return DeltaState(ops, self, block_size, layers, blocks)


def _bytes(arrays: Sequence[ArraySpec]) -> int:
    return sum(int(np.prod(one.shape)) * one.dtype.itemsize for one in arrays)


@dataclass
class DeltaTable(BlockTable):
    """The state of one sequence. `current` is its slot, from its first token on, unless it begins with a snapshot.

    snapshots: number of a block → the snapshot of its end; those of the newest growth alone.
    """

    snapshots: dict[int, int] = field(default_factory=dict)

    def block(self, number: int) -> int | None:
        return self.snapshots.get(number)


class DeltaState:
    """A `LayerState`."""

    is_sparse = True
    can_cut = True

    def __init__(
        self, ops: Ops, shape: DeltaShape, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]
    ) -> None:
        self.layers, self.block_size = layers, block_size
        self.quantized, self.full = map(BlockAllocator, blocks)
        self._ops, self._shape = ops, shape
        quantized, full = blocks
        arrays = shape.full_arrays(block_size)
        self._slots = {layer: new_slots(ops.of_layer(layer), arrays, full) for layer in layers}
        self._of_cards: dict[Ops, list[DeltaSlots]] = {}
        for layer, slots in self._slots.items():
            self._of_cards.setdefault(ops.of_layer(layer), []).append(slots)
        self._snapshots = {
            layer: {
                name: np.zeros((quantized, *shape), dtype) for name, shape, dtype in shape.block_arrays(block_size, "")
            }
            for layer in layers
        }

    def cache(self, layer: int) -> DeltaSlots:
        """Return the slots of one layer."""
        return self._slots[layer]

    def new_table(self) -> DeltaTable:
        return DeltaTable()

    # -- growing -----------------------------------------------------------------------------------------------

    def open(self, table: BlockTable, start: int, count: int, buffers: Buffers, *, as_steps: bool) -> Growth:
        """Reserve a slot, and snapshots where there is room for them; as in steps, none in an answer."""
        assert isinstance(table, DeltaTable)
        n, end = self.block_size, start + count
        own = table.current if end // n == start // n else None
        new = [] if own is not None else self.full.allocate()
        growth = Growth({end // n: new[0] if own is None else own}, {}, new)
        try:
            numbers = [] if as_steps else ends_to_keep(start // n, end // n, table.branch)
            numbers = numbers[max(0, len(numbers) - self.quantized.free) :]
            growth.quantized = dict(zip(numbers, self.quantized.allocate(len(numbers)), strict=True))
            slot, ends = self._shape.full_arrays(n), self._shape.full_arrays(0)
            growth.buffer = new_prompts(self._of_cards, slot, ends, numbers)
        except BaseException:  # there is no memory for the buffer
            self.abort(growth)
            raise
        return growth

    def open_step(self, table: BlockTable, start: int, count: int) -> Growth:
        """Reserve a slot, if the sequence has none yet; it then begins with the snapshot that the sequence has."""
        assert start % self.block_size + count <= self.block_size
        if table.current is not None:
            return Growth({start // self.block_size: table.current}, {}, [])
        new = self.full.allocate()
        for layer, slots in self._slots.items():
            self._begin(layer, table, start, one_slot(slots, new[0]))
        return Growth({start // self.block_size: new[0]}, {}, new)

    def _begin(self, layer: int, table: BlockTable, start: int, slot: DeltaSlots) -> None:
        """Write what a sequence begins with, that has no slot: nothing, or the snapshot at `start`."""
        ops, inputs = self._ops.of_layer(layer), slot.inputs[0, : self._shape.mixer.width - 1]
        if start == 0:
            ops.assign(slot.matrices[0], 0)
            ops.assign(inputs, 0)
            return
        block = table.block(start // self.block_size - 1)
        assert block is not None
        kept = {name: array[block] for name, array in self._snapshots[layer].items()}
        ops.assign(slot.matrices[0], ops.restore_states(kept, self._shape.codes))
        ops.assign(inputs, ops.to_device(kept["inputs"]))

    def view(self, layer: int, table: BlockTable, growth: Growth, start: int, rows: slice, position: int) -> View:
        return View(growth.buffer, next(iter(growth.slots.values())), rows, position)

    def spans(self, views: Sequence[View]) -> np.ndarray | PromptRows:
        if views and views[0].prompts is not None:
            return PromptRows(views, self.block_size)
        spans = [
            DeltaSpan(view.slot, view.rows.start, view.rows.stop - view.rows.start, view.position % self.block_size)
            for view in views
        ]
        return np.array(spans, np.int32).reshape(-1, len(DeltaSpan._fields))

    def begin_layer(self, layer: int, table: BlockTable, growth: Growth, start: int) -> None:
        if growth.buffer is None:
            return
        ops = self._ops.of_layer(layer)
        if table.current is None:
            self._begin(layer, table, start, growth.buffer[ops].slot)
        else:
            current = one_slot(self._slots[layer], table.current)
            copy_slot(ops, growth.buffer[ops].slot, current, start % self.block_size)

    def seal(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Copy the state after a prompt to the growth's slot, and begin to copy its snapshots to the host."""
        if growth.buffer is None:
            return
        ops = self._ops.of_layer(layer)
        slot, ends, kept = growth.buffer[ops]
        (target,) = growth.slots.values()
        copy_slot(ops, one_slot(self._slots[layer], target), slot, (start + count) % self.block_size)
        if growth.quantized:
            kept[layer] = ops.keep_states(ends, self._shape.codes)

    def _write(self, kept: Mapping[int, FetchStates], blocks: Collection[int]) -> None:
        """Write snapshots of all layers, in the order of `blocks`."""
        for layer, fetch in kept.items():
            arrays = fetch()
            for name, snapshots in self._snapshots[layer].items():
                snapshots[list(blocks)] = arrays[name]

    def round_trip(self, layer: int, growth: Growth, start: int, count: int) -> None:
        """Nothing: what the next tokens read is exact."""

    def filled_blocks(self, growths: Sequence[tuple[Growth, int]]) -> tuple[()]:
        return ()

    def commit(self, table: BlockTable, growth: Growth, length: int) -> None:
        """Take the growth's slot, which advances if a step has completed its block, and its snapshots."""
        assert isinstance(table, DeltaTable)
        ((number, slot),) = growth.slots.items()
        if growth.buffer is not None:
            self._write(next(iter(growth.buffer.values())).kept, growth.quantized.values())
        elif length // self.block_size > number:
            for ops, layers in self._of_cards.items():
                ops.advance_delta(layers, [slot], tiled=self._shape.mixer.tiled)
        if table.current not in (None, slot):
            self.full.release(table.current)
        table.current = slot
        self._release_snapshots(table)
        table.snapshots = growth.quantized

    def abort(self, growth: Growth) -> None:
        for block in growth.quantized.values():
            self.quantized.release(block)
        for slot in growth.new_slots:
            self.full.release(slot)

    def release(self, table: BlockTable) -> None:
        assert isinstance(table, DeltaTable)
        self._release_snapshots(table)
        if table.current is not None:
            self.full.release(table.current)
            table.current = None

    def _release_snapshots(self, table: DeltaTable) -> None:
        for _, block in sorted(table.snapshots.items(), reverse=True):
            self.quantized.release(block)
        table.snapshots = {}

    # -- prefixes ----------------------------------------------------------------------------------------------

    def first_visible(self, length: int) -> int:
        """Return the number of the block whose end is at `length`, or of the current block, where nothing is needed."""
        return max(0, length - 1) // self.block_size

    def share(self, blocks: Sequence[int | None], length: int) -> DeltaTable:
        if length == 0 or length % self.block_size:
            return DeltaTable()  # a slot follows
        block = blocks[-1]
        assert block is not None
        self.quantized.retain(block)
        return DeltaTable(snapshots={len(blocks) - 1: block})

    def keep_end(self, table: BlockTable, length: int) -> int | None:
        assert isinstance(table, DeltaTable)
        number = length // self.block_size - 1
        if number not in table.snapshots and table.current is not None:
            try:
                (block,) = self.quantized.allocate()
            except OutOfBlocks:
                return None
            before, kept = self._shape.mixer.width - 1, {}
            for layer, slots in self._slots.items():
                own = one_slot(slots, table.current)
                ends = DeltaEnds([number], own.matrices, own.inputs[:, :before])
                kept[layer] = self._ops.of_layer(layer).keep_states(ends, self._shape.codes)
            self._write(kept, [block])
            table.snapshots[number] = block
        return table.block(number)

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        for layer, slots in self._slots.items():
            copy_slot(self._ops.of_layer(layer), one_slot(slots, target), one_slot(slots, source), tokens)

    # -- blocks on the host ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        ids = list(blocks)
        return {(layer, name): array[ids] for layer, own in self._snapshots.items() for name, array in own.items()}

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        for layer, own in self._snapshots.items():
            for name, array in own.items():
                array[list(blocks)] = arrays[layer, name]

    def read_full(self, slot: int, tokens: int) -> BlockArrays:
        return {
            (layer, name): self._ops.of_layer(layer).to_host(array[0])
            for layer, slots in self._slots.items()
            for name, array in first_tokens(one_slot(slots, slot), tokens)._asdict().items()
        }

    def write_full(self, slot: int, arrays: BlockArrays) -> None:
        for layer, slots in self._slots.items():
            ops, tokens = self._ops.of_layer(layer), arrays[layer, "decays"].shape[1]
            for name, array in first_tokens(one_slot(slots, slot), tokens)._asdict().items():
                ops.assign(array[0], ops.to_device(arrays[layer, name]))

    def reserve_table(self, length: int, dropped: int, with_sink: bool) -> DeltaTable:
        complete = length // self.block_size
        has_snapshot = max(0, complete - 1) > dropped
        if with_sink or (has_snapshot and (dropped != complete - 2 or length % self.block_size)):
            raise ValueError(f"{length} tokens do not have {complete - 1 - dropped} snapshots")
        if has_snapshot:
            return DeltaTable(snapshots={complete - 1: self.quantized.allocate()[0]})
        return DeltaTable(current=self.full.allocate()[0] if length else None)

    def bytes(self, table: BlockTable) -> int:
        assert isinstance(table, DeltaTable)
        full = (table.current is not None) * self._shape.full_bytes(self.block_size)
        return len(self.layers) * (full + len(table.snapshots) * self._shape.quantized_bytes(self.block_size))
