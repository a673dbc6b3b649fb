"""The state of recurrent layers: a slot for each running sequence, and snapshots at the ends of some blocks.

A slot has the matrices at the start of the current block, and what each of its tokens adds (`backends.delta`). When a
block is complete, its slot advances to the next one. A snapshot is a quantized block: it stands for all tokens before
its end.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, FetchStates, SlotRows
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.quantization.snapshot_codes import EIGHT_BITS, SnapshotCodes
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.layer_shapes import ArraySpec, RecurrentShape
from polarlm.engine.state.layer_state import BlockArrays, Buffers
from polarlm.engine.state.recurrent.slots import F32, RecurrentState, RowsOp, Slot, assign_each, first_tokens
from polarlm.engine.state.tables import BlockTable, Reservation
from polarlm.model_loaders.config import ChannelDelta, Recurrent

_SNAPSHOTS = 2  # for each slot
_STEP = 4  # factor between the distances from the end of a prompt to the snapshots before it


@dataclass(frozen=True)
class DeltaShape(RecurrentShape):
    """How one layer stores its state. codes: how snapshots keep its matrices. snapshots: their number; None: two for
    each slot."""

    mixer: Recurrent
    codes: SnapshotCodes = EIGHT_BITS
    snapshots: int | None = None
    is_sparse: ClassVar[bool] = True

    @property
    def group(self) -> Hashable:
        return type(self), self.mixer

    def held_blocks(self, tokens: int, block_size: int) -> tuple[int, int]:
        return 0, int(tokens > 0)

    def needed_blocks(self, tokens: int, block_size: int) -> int:
        return 0

    def slots(self, full_slots: int, more: int, recent: int) -> int:
        """One for each sequence, which has at least two of K/V, and a spare one; further ones are kept as snapshots."""
        return (full_slots + 1) // 2

    def more_blocks(self, full_slots: int, more: int) -> int:
        return _SNAPSHOTS * self.slots(full_slots + more, 0, 0) if self.snapshots is None else self.snapshots

    def block_arrays(self, block_size: int, stored_as: str) -> list[ArraySpec]:
        mixer = self.mixer
        fields = self.codes.fields(mixer.key_dim, mixer.value_dim).items()
        return [
            *(ArraySpec(name, (mixer.value_heads, *shape), dtype) for name, (shape, dtype) in fields),
            ArraySpec("inputs", (mixer.width - 1, mixer.channels), np.dtype(np.float32)),
        ]

    def full_arrays(self, tokens: int) -> list[ArraySpec]:
        mixer = self.mixer
        shapes = DeltaSlots(
            matrices=(mixer.value_heads, mixer.key_dim, mixer.value_dim),
            keys=(mixer.key_heads, mixer.key_dim, tokens),
            updates=(mixer.value_heads, tokens, mixer.value_dim),
            decays=(mixer.value_heads, *((mixer.key_dim,) if isinstance(mixer, ChannelDelta) else ()), tokens),
            inputs=(mixer.width - 1 + tokens, mixer.channels),
        )
        return [ArraySpec(name, shape, F32) for name, shape in shapes._asdict().items()]

    def state(self, ops: Ops, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]) -> DeltaState:
        return DeltaState(ops, self, block_size, layers, blocks)


@dataclass
class DeltaTable(BlockTable):
    """The state of one sequence. `current` is its slot, from its first token on, unless it begins with a snapshot.
    snapshots: number of a block → the snapshot of its end; only the newest reservation's snapshots. planned: the
    numbers of blocks at whose ends steps take snapshots, certain ones and guesses."""

    snapshots: dict[int, int] = field(default_factory=dict)
    planned: tuple[Sequence[int], Sequence[int]] = ((), ())

    def block(self, number: int) -> int | None:
        return self.snapshots.get(number)

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.snapshots), int(self.current is not None)

    @property
    def newest_first(self) -> list[int]:
        """The snapshots, the newest one first."""
        return [block for _, block in sorted(self.snapshots.items(), reverse=True)]


class _Prompt(NamedTuple):
    """See `PromptSpan`. ends: the states to keep, with the numbers of their blocks in the sequence. fetches: the
    snapshots of the layers before it, of all GPUs."""

    block_size: int
    slot: DeltaSlots  # one
    ends: DeltaEnds
    fetches: dict[int, FetchStates]

    def add(self, ops: Ops, op: RowsOp, inputs: Array, weights: Sequence[Any], position: int) -> Array:
        number, place = divmod(position, self.block_size)
        spans = np.array([DeltaSpan(0, 0, len(inputs), place)], np.int32)
        ends = self.ends._replace(numbers=[end - number for end in self.ends.numbers])
        return op(inputs, *weights, SlotRows(self.slot, spans, ends))


class DeltaState(RecurrentState):
    """A `LayerState`."""

    is_sparse = True

    def __init__(
        self, ops: Ops, shape: DeltaShape, block_size: int, layers: tuple[int, ...], blocks: tuple[int, int]
    ) -> None:
        super().__init__(ops, shape, block_size, layers, blocks)
        self._shape = shape
        self._caches_by_ops: dict[Ops, list[DeltaSlots]] = {}
        for layer in layers:
            self._caches_by_ops.setdefault(ops.layer_ops(layer), []).append(self.cache(layer))
        self._snapshots = {
            layer: {
                name: np.zeros((blocks[0], *shape), dtype) for name, shape, dtype in shape.block_arrays(block_size, "")
            }
            for layer in layers
        }

    def cache(self, layer: int) -> DeltaSlots:
        return DeltaSlots(*self._slots[layer])

    def new_table(self) -> DeltaTable:
        return DeltaTable()

    # -- growing -----------------------------------------------------------------------------------------------

    def open(self, table: BlockTable, start: int, count: int, buffers: Buffers, *, as_steps: bool) -> Reservation:
        """Reserve a slot, and snapshots where there is room for them; as in steps, none in an answer."""
        assert isinstance(table, DeltaTable)
        n, end = self.block_size, start + count
        current = table.current if end // n == start // n else None
        new = [] if current is not None else self.full.allocate()
        reservation = Reservation({end // n: new[0] if current is None else current}, {}, new)
        try:
            if not as_steps:
                reservation.quantized.update(self._reserve_snapshots(*self._places(table, start, end)))
            reservation.buffer = self._prompts([*reservation.quantized])
        except BaseException:  # there is no memory for the buffer
            self.abort(reservation)
            raise
        return reservation

    def _places(self, table: BlockTable, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Return the numbers of blocks which a prompt from `start` to `stop` completes and at whose ends it takes
        snapshots: certainly of the last one and of the one where another prompt has left this mixer, and guesses where
        a later prompt may continue."""
        new = range(max(1, start // self.block_size), stop // self.block_size)
        certain = sorted({*new[-1:], table.branch} & {*new})
        return certain, [number for number in places_to_guess(new, table.edges) if number not in certain]

    def _reserve_snapshots(self, certain: Sequence[int], guesses: Sequence[int]) -> dict[int, int]:
        """Reserve snapshots at the ends of these blocks where there is room for them; of guesses beside what may be
        needed."""
        certain = certain[max(0, len(certain) - self.quantized.free) :]
        blocks = self.quantized.allocate(len(certain))
        guesses = guesses[: self.quantized.idle]
        blocks += self.quantized.allocate(len(guesses), are_guesses=True)
        return dict(sorted(zip([*certain, *guesses], blocks, strict=True)))

    def plan_snapshots(self, table: BlockTable, start: int, stop: int) -> None:
        assert isinstance(table, DeltaTable)
        table.planned = self._places(table, start, stop)

    def _prompts(self, numbers: Sequence[int]) -> dict[Ops, _Prompt]:
        """Return the buffers of a prompt on each GPU, which keeps the states at the ends of blocks `numbers`."""
        fetches: dict[int, FetchStates] = {}
        ends = {spec.name: (len(numbers), *spec.shape) for spec in self._specs(0)}
        return {
            ops: _Prompt(
                self.block_size,
                DeltaSlots(*(ops.empty((1, *spec.shape)) for spec in self._specs(self.block_size))),
                DeltaEnds(numbers, ops.empty(ends["matrices"]), ops.empty(ends["inputs"])),
                fetches,
            )
            for ops in self._caches_by_ops
        }

    def open_step(self, table: BlockTable, start: int, count: int) -> Reservation:
        """Reserve a slot, if the sequence has none yet; it then begins with the snapshot that the sequence has. Reserve
        a snapshot if one is planned for the end of these rows."""
        assert isinstance(table, DeltaTable)
        number, place = divmod(start, self.block_size)
        assert place + count <= self.block_size
        new = [] if table.current is not None else self.full.allocate()
        for layer in self.layers if new else ():
            self._begin(layer, table, start, self._slot(layer, new[0], 0))
        ends = [number] if place + count == self.block_size else []
        snapshots = self._reserve_snapshots(*([one for one in ends if one in places] for places in table.planned))
        return Reservation({number: new[0] if table.current is None else table.current}, snapshots, new)

    def _begin(self, layer: int, table: BlockTable, start: int, slot: Slot) -> None:
        """Write what a sequence without a slot begins with to a slot without tokens: zeros, or its snapshot."""
        ops, (matrices, *_, inputs) = self._ops.layer_ops(layer), slot
        if start == 0:
            ops.assign(matrices, 0)
            ops.assign(inputs, 0)
            return
        block = table.block(start // self.block_size - 1)
        assert block is not None
        snapshot = {name: array[block] for name, array in self._snapshots[layer].items()}
        ops.assign(matrices, ops.restore_states(snapshot, self._shape.codes))
        ops.assign(inputs, ops.to_device(snapshot["inputs"]))

    def _step_view(self, reservation: Reservation, start: int, rows: slice, position: int) -> DeltaSpan:
        slot = next(iter(reservation.slots.values()))
        return DeltaSpan(slot, rows.start, rows.stop - rows.start, position % self.block_size)

    def _step_rows(self, views: Sequence[DeltaSpan]) -> np.ndarray:
        return np.array(views, np.int32).reshape(-1, len(DeltaSpan._fields))

    def begin(self, layers: Sequence[int], table: BlockTable, reservation: Reservation, start: int) -> None:
        if reservation.buffer is None:
            return
        (layer,) = layers
        ops, place = self._ops.layer_ops(layer), start % self.block_size
        slot = first_tokens(reservation.buffer[ops].slot, 0, self._specs(place))
        if table.current is None:
            self._begin(layer, table, start, slot)
        else:
            assign_each(ops, slot, self._slot(layer, table.current, place))

    def seal(self, layers: Sequence[int], reservation: Reservation, start: int, count: int) -> tuple[()]:
        """Copy the state after a prompt to the reservation's slot, and begin to copy its snapshots to the host."""
        if reservation.buffer is None:
            return ()
        (layer,) = layers
        ops, place = self._ops.layer_ops(layer), (start + count) % self.block_size
        prompt: _Prompt = reservation.buffer[ops]
        (target,) = reservation.slots.values()
        state = first_tokens(prompt.slot, 0, self._specs(place))
        assign_each(ops, self._slot(layer, target, place), state)
        if reservation.quantized:
            prompt.fetches[layer] = ops.keep_states(prompt.ends, self._shape.codes)
        return ()

    def _write(self, fetches: Mapping[int, FetchStates], blocks: Collection[int]) -> None:
        """Write snapshots of all layers, in the order of `blocks`."""
        for layer, fetch in fetches.items():
            arrays = fetch()
            for name, snapshots in self._snapshots[layer].items():
                snapshots[list(blocks)] = arrays[name]

    def _keep(self, slot: int, snapshots: Mapping[int, int]) -> None:
        """Write a snapshot of a slot in which a block begins, if there is one."""
        fetches, one = {}, slice(slot, slot + 1)
        for layer in self.layers if snapshots else ():
            slots = self.cache(layer)
            ends = DeltaEnds([*snapshots], slots.matrices[one], slots.inputs[one, : self._inputs_before])
            fetches[layer] = self._ops.layer_ops(layer).keep_states(ends, self._shape.codes)
        self._write(fetches, snapshots.values())

    def commit(self, table: BlockTable, reservation: Reservation, length: int) -> None:
        """Take the reservation's slot, which advances if a step has completed its block, and its snapshots."""
        assert isinstance(table, DeltaTable)
        ((number, slot),) = reservation.slots.items()
        if reservation.buffer is not None:
            self._write(next(iter(reservation.buffer.values())).fetches, reservation.quantized.values())
        elif length // self.block_size > number:
            for ops, layers in self._caches_by_ops.items():
                ops.advance_delta(layers, [slot], tiled=self._shape.mixer.tiled)
            self._keep(slot, reservation.quantized)
        else:
            self._release(reservation.quantized.values(), ())
            reservation.quantized = {}
        if table.current not in (None, slot):
            self.full.release(table.current)
        table.current = slot
        if table.snapshots:
            self._release(table.newest_first, ())
        table.snapshots = reservation.quantized

    def release(self, table: BlockTable) -> None:
        assert isinstance(table, DeltaTable)
        self._release(table.newest_first, [] if table.current is None else [table.current])
        table.current, table.snapshots = None, {}

    # -- prefixes ----------------------------------------------------------------------------------------------

    def first_visible(self, length: int) -> int:
        """Return the number of the block whose end is at `length`, or of the current block, where nothing is needed."""
        return max(0, length - 1) // self.block_size

    def share(self, blocks: Sequence[int | None], recent: Sequence[int], length: int) -> DeltaTable:
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
            self._keep(table.current, {number: block})
            table.snapshots[number] = block
        return table.block(number)

    # -- blocks on the host ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        ids = list(blocks)
        return {
            (layer, name): array[ids] for layer, arrays in self._snapshots.items() for name, array in arrays.items()
        }

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        for layer, snapshots in self._snapshots.items():
            for name, array in snapshots.items():
                array[list(blocks)] = arrays[layer, name]

    def reserve_table(self, length: int, dropped: int, recent: int, *, with_sink: bool) -> DeltaTable:
        complete = length // self.block_size
        has_snapshot = max(0, complete - 1) > dropped
        if with_sink or (has_snapshot and (dropped != complete - 2 or length % self.block_size)):
            raise ValueError(f"{length} tokens do not have {complete - 1 - dropped} snapshots")
        if has_snapshot:
            return DeltaTable(snapshots={complete - 1: self.quantized.allocate()[0]})
        return DeltaTable(current=self.full.allocate()[0] if length else None)


def places_to_guess(new: range, edges: Sequence[int]) -> list[int]:
    """Return the numbers of blocks at whose ends a later prompt may continue, among the `new` ones of a prompt, the
    likeliest first, and at most log₄ of the new blocks: none is new[-1]. Block 0 is computed again in less time than
    reading its state takes.

    Agents drop the results of tools and what was thought, and people ask the last question again. So these are of the
    blocks before `edges` of messages the last one, the 4th, the 16th … from the end. Where there are none, they are the
    blocks 4, 16, 64, … before the last one.
    """
    before_edges = [number for number in edges if number in new[:-1]]
    places, first = (before_edges, 0) if before_edges else (new[:-1], 1)
    powers = range(first, len(places).bit_length())
    return [places[-(_STEP**power)] for power in powers if _STEP**power <= len(places)]
