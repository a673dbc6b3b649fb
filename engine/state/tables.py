"""Block tables map the number of a block in its sequence to its id. Integers only; the arrays are the store's.

Blocks are numbered from the start of a sequence. Block 0 becomes the *sink*, and the block being filled is the *current
block*; both are in full-precision slots. Complete blocks between them are quantized. To grow a sequence, `grow` (for a
prompt) or `open_step` reserves blocks, and `commit` or `abort` follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks


@dataclass
class BlockTable:
    """The blocks of one sequence, for the layers of one group. Block i ≥ 1 is quantized[i − 1 − dropped]."""

    sink: int | None = None  # full-precision slot
    quantized: list[int] = field(default_factory=list)
    dropped: int = 0  # quantized blocks at the front that left the window
    current: int | None = None  # full-precision slot, held while the current block has tokens
    branch: int | None = None  # number of a block up to whose end other groups had blocks, when the sequence began
    edges: Sequence[int] = ()  # numbers of blocks whose next one has the beginning or the end of a message; ascending

    def block(self, number: int) -> int | None:
        """Return the id of the complete block `number` ≥ 1; None if it has left the window."""
        index = number - 1 - self.dropped
        return self.quantized[index] if index >= 0 else None

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of quantized blocks and of slots."""
        return len(self.quantized), (self.sink is not None) + (self.current is not None)


@dataclass
class Reservation:
    """The blocks and slots that are reserved for new tokens of one block table: number of a block → id. buffer: the K/V
    of a prompt's layer, from the start of the current block on; None for a step. first: its block in the buffer."""

    slots: dict[int, int]  # full-precision slots; for a current block that has tokens, the slot that the table holds
    quantized: dict[int, int]  # quantized blocks, for the blocks that become complete and that later tokens see
    new_slots: list[int]  # the slots that were allocated for this reservation
    buffer: Any = None
    first: int = 0


class TableGroup:
    """Grows the block tables of all layers with the same window, and allocates their blocks."""

    is_sparse = False

    def __init__(self, block_size: int, window: int | None, quantized: int, full: int):
        self.block_size = block_size
        self.window = window
        self.quantized = BlockAllocator(quantized)
        self.full = BlockAllocator(full)

    def oldest_visible(self, length: int) -> int:
        """Return the first position that the token after `length` tokens, or a later one, can see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def new_table(self) -> BlockTable:
        return BlockTable()

    def keep_end(self, table: BlockTable, length: int) -> int | None:
        return None  # the blocks of a sequence's tokens continue it

    def plan_snapshots(self, table: BlockTable, start: int, stop: int) -> None:
        """As `LayerState.plan_snapshots`: all blocks are kept."""

    def grow(self, table: BlockTable, start: int, count: int) -> Reservation:
        """Reserve blocks for a prompt's `count` tokens from position `start`; all are kept. If it raises OutOfBlocks,
        nothing has changed."""
        n = self.block_size
        end = start + count
        first, complete, rest = start // n, end // n, end % n
        oldest = self.oldest_visible(end)
        numbers = [0] if first == 0 and complete > 0 and oldest < n else []
        numbers += [complete] if rest else []
        # The current block keeps its slot. Tokens that complete the block leave the slot unchanged until commit, so
        # that an abort loses nothing.
        current = table.current if first in numbers else None
        return self._reserve(range(max(1, first, oldest // n), complete), numbers, current)

    def open_step(self, table: BlockTable, start: int, count: int) -> Reservation:
        """As `LayerState.open_step`: slots for all blocks that the rows touch, quantized blocks for those that they may
        fill."""
        n = self.block_size
        first, complete, last = start // n, (start + count) // n, (start + count - 1) // n
        quantized = [block for block in range(max(1, first), complete) if self.first_visible((block + 1) * n) <= block]
        return self._reserve(quantized, range(first, last + 1), table.current)

    def _reserve(self, quantized: Sequence[int], numbers: Sequence[int], current: int | None) -> Reservation:
        """Allocate quantized blocks for the numbers `quantized` and slots for `numbers`; the first one gets the slot
        `current` unless that is None."""
        blocks = self.quantized.allocate(len(quantized))
        try:
            new_slots = self.full.allocate(len(numbers) - (current is not None))
        except OutOfBlocks:
            self._release(blocks, ())
            raise
        slots = [*([] if current is None else [current]), *new_slots]
        return Reservation(dict(zip(numbers, slots, strict=True)), dict(zip(quantized, blocks, strict=True)), new_slots)

    def abort(self, reservation: Reservation) -> None:
        self._release(reservation.quantized.values(), reservation.new_slots)

    def filled_slots(self, reservation: Reservation, length: int) -> list[tuple[int, int]]:
        """Return (quantized block, slot to encode) of each block that a step fills if its sequence gets this length."""
        visible = range(self.first_visible(length), length // self.block_size)
        blocks = reservation.quantized.items()
        return [(block, reservation.slots[number]) for number, block in blocks if number in visible]

    def commit(self, table: BlockTable, reservation: Reservation, length: int) -> None:
        complete, rest = divmod(length, self.block_size)
        # Most steps only append to the current slot.
        if rest and not reservation.quantized and not reservation.new_slots:
            self.leave_window(table, length)
            return
        slots = {slot for slot in (table.current, *reservation.slots.values()) if slot is not None}
        table.current = reservation.slots[complete] if rest else None
        if complete and 0 in reservation.slots:
            table.sink = reservation.slots[0]
        table.quantized += [block for number, block in reservation.quantized.items() if number < complete]
        table.dropped = max(0, complete - 1) - len(table.quantized)
        unused = [block for number, block in reservation.quantized.items() if number >= complete]
        self._release(unused, sorted(slots - {table.current, table.sink}))
        self.leave_window(table, length)

    def leave_window(self, table: BlockTable, length: int) -> None:
        """Release the blocks that no token after `length` tokens can see."""
        if self.window is None:
            return
        first = self.first_visible(length)
        if table.sink is not None and first > 0:
            self.full.release(table.sink)
            table.sink = None
        count = min(len(table.quantized), max(0, first - 1 - table.dropped))
        self._release(table.quantized[:count], ())
        table.quantized = table.quantized[count:]
        table.dropped += count

    def first_visible(self, length: int) -> int:
        return self.oldest_visible(length) // self.block_size

    def share(self, blocks: Sequence[int | None], length: int) -> BlockTable:
        """As `LayerState.share`. None stands for a block outside the window of those tokens."""
        first = self.first_visible(length)
        table = BlockTable(dropped=max(0, min(first, len(blocks)) - 1))
        for number, block in enumerate(blocks):
            if number < first:
                continue
            assert block is not None
            (self.quantized if number else self.full).retain(block)
            if number:
                table.quantized.append(block)
            else:
                table.sink = block
        return table

    def reserve_table(self, length: int, dropped: int, with_sink: bool) -> BlockTable:
        n, oldest = self.block_size, self.oldest_visible(length)
        complete, rest = divmod(length, n)
        quantized = max(0, complete - 1) - dropped
        lacks_sink = complete > 0 and oldest < n and not with_sink
        if quantized < 0 or not 0 <= dropped <= max(0, oldest // n - 1) or lacks_sink or (with_sink and not complete):
            raise ValueError(
                f"{length} tokens cannot have {quantized} quantized blocks and {dropped} outside the window"
            )
        table = BlockTable(quantized=self.quantized.allocate(quantized), dropped=dropped)
        try:
            slots = self.full.allocate(with_sink + (rest > 0))
        except OutOfBlocks:
            self.release(table)
            raise
        table.sink = slots.pop() if with_sink else None
        table.current = slots.pop() if rest else None
        return table

    def release(self, table: BlockTable) -> None:
        """As `LayerState.release`, last blocks first, so that they are reused first: each needs the blocks before
        it."""
        self._release(table.quantized[::-1], [slot for slot in (table.current, table.sink) if slot is not None])

    def _release(self, quantized: Iterable[int], full: Iterable[int]) -> None:
        for block in quantized:
            self.quantized.release(block)
        for slot in full:
            self.full.release(slot)
