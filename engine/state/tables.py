"""Block tables map the number of a block in its sequence to its id. Integers only; the arrays are the store's.

Blocks are numbered from the start of a sequence. Block 0 becomes the *sink*, and the block being filled is the *current
block*. Both are in full-precision slots, and so are the *recent blocks*: the newest complete blocks, of which a group
keeps as many as its cache type says. A block is quantized when it is no longer one of them. To grow a sequence, `grow`
(for a prompt) or `open_step` reserves blocks, and `commit` or `abort` follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks, OutOfSlots


@dataclass
class BlockTable:
    """The blocks of one sequence, for the layers of one group. Block i ≥ 1 is quantized[i − 1 − dropped], and those
    after these are recent blocks."""

    sink: int | None = None  # full-precision slot
    quantized: list[int] = field(default_factory=list)
    dropped: int = 0  # blocks at the front that left the window
    recent: list[int] = field(default_factory=list)  # full-precision slots
    current: int | None = None  # full-precision slot, held while the current block has tokens
    branch: int | None = None  # number of a block up to whose end other groups had blocks, when the sequence began
    edges: Sequence[int] = ()  # numbers of blocks whose next one has the beginning or the end of a message; ascending

    @property
    def first_recent(self) -> int:
        """The number of the first block behind the quantized ones."""
        return 1 + self.dropped + len(self.quantized)

    def block(self, number: int) -> int | None:
        """Return the id of the quantized block `number` ≥ 1; None if it has left the window, or is a recent block."""
        index = number - 1 - self.dropped
        return self.quantized[index] if 0 <= index < len(self.quantized) else None

    def slot(self, number: int) -> int | None:
        """Return the slot of the complete block `number`; None if it has left the window, or is quantized."""
        index = number - self.first_recent
        if number == 0:
            return self.sink
        return self.recent[index] if 0 <= index < len(self.recent) else None

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of quantized blocks and of slots."""
        return len(self.quantized), (self.sink is not None) + len(self.recent) + (self.current is not None)


@dataclass
class Reservation:
    """The blocks and slots of new tokens in one block table: number of a block → id.

    slots: of all blocks behind the quantized ones that stay in full precision, or that are quantized now; in a prompt
    also of the first block. quantized: for the blocks that may be quantized now, and that later tokens see. new_slots:
    those that were allocated for this reservation. buffer: the K/V of a prompt's layer, from block `start` on, which is
    the buffer's block `first`; None for a step.
    """

    slots: dict[int, int]
    quantized: dict[int, int]
    new_slots: list[int]
    start: int = 0
    buffer: Any = None
    first: int = 0


class TableGroup:
    """Grows the block tables of all layers with the same window, and allocates their blocks. recent_blocks: the most
    that a sequence keeps."""

    is_sparse = False

    def __init__(self, block_size: int, window: int | None, quantized: int, full: int, recent_blocks: int = 0):
        self.block_size = block_size
        self.window = window
        self.recent_blocks = recent_blocks
        self.quantized = BlockAllocator(quantized)
        self.full = BlockAllocator(full)
        # Slots of recent blocks → quantized blocks that have, or will have, their codes. A slot that is held holds its
        # block here.
        self.ahead: dict[int | None, int] = {}

    def oldest_visible(self, length: int) -> int:
        """Return the first position that the token after `length` tokens, or a later one, can see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def new_table(self) -> BlockTable:
        return BlockTable()

    def keep_end(self, table: BlockTable, length: int) -> int | None:
        return None  # the blocks of a sequence's tokens continue it

    def plan_snapshots(self, table: BlockTable, start: int, stop: int) -> None:
        """As `LayerState.plan_snapshots`: all blocks are kept."""

    def first_full(self, table: BlockTable, length: int) -> int:
        """Return the number of the first block in full precision of a sequence of `length` tokens, except the sink."""
        return table.first_recent if length >= self.block_size else 0

    def grow(self, table: BlockTable, start: int, count: int) -> Reservation:
        """Reserve blocks for a prompt's `count` tokens from position `start`; all are kept. If it raises OutOfBlocks,
        nothing has changed."""
        n, end = self.block_size, start + count
        complete, rest = divmod(end, n)
        first, visible = self.first_full(table, start), self.first_visible(end)
        oldest, recent = max(1, first, visible), complete - self.recent_blocks
        # Slots keep the tokens that they have until commit, so that an abort loses nothing.
        numbers = [0] if first == 0 and complete > 0 and visible == 0 else []
        numbers += [*range(max(oldest, recent), complete), *([complete] if rest else [])]
        return self._reserve(table, start, range(oldest, recent), numbers)

    def open_step(self, table: BlockTable, start: int, count: int) -> Reservation:
        """As `LayerState.open_step`: slots for all blocks that the rows touch, quantized blocks for those that may
        become too old for a slot."""
        n = self.block_size
        first, complete, last = self.first_full(table, start), (start + count) // n, (start + count - 1) // n
        recent = complete - self.recent_blocks
        ages = ((number, (number + 1 + self.recent_blocks) * n) for number in range(max(1, first), recent))
        quantized = [number for number, length in ages if self.first_visible(length) <= number]
        return self._reserve(table, start, quantized, range(first, last + 1))

    def _reserve(self, table: BlockTable, start: int, quantized: Sequence[int], numbers: Sequence[int]) -> Reservation:
        """Allocate quantized blocks for the numbers `quantized`, and slots for those of `numbers` that have none."""
        first, held = self.first_full(table, start), self.held_slots(table)
        slots = dict(enumerate(held, first))
        blocks = self._blocks_of([slots.get(number) for number in quantized])
        lacking = [number for number in numbers if number not in slots]
        try:
            new_slots = self.full.allocate(len(lacking))
        except OutOfBlocks as error:
            self._release(blocks, ())
            raise OutOfSlots(str(error)) from None
        slots |= zip(lacking, new_slots, strict=True)
        kept = {number: slots[number] for number in numbers}
        return Reservation(kept, dict(zip(quantized, blocks, strict=True)), new_slots, first)

    def _blocks_of(self, slots: Sequence[int | None]) -> list[int]:
        """Return a quantized block for each slot: that of its `ahead` codes, or one that is allocated now."""
        ahead = [self.ahead.get(slot) for slot in slots]
        blocks = iter(self.quantized.allocate(ahead.count(None)))
        for block in ahead:
            if block is not None:
                self.quantized.retain(block)
        return [next(blocks) if block is None else block for block in ahead]

    def held_slots(self, table: BlockTable) -> list[int]:
        """Return the slots of a table's blocks behind the quantized ones, in order."""
        return [*table.recent, *([] if table.current is None else [table.current])]

    def reservation(self, table: BlockTable, length: int) -> Reservation:
        """Return the reservation of a step that changes no block of a sequence of `length` tokens."""
        first = self.first_full(table, length)
        return Reservation(dict(enumerate(self.held_slots(table), first)), {}, [], first)

    def abort(self, reservation: Reservation) -> None:
        self._release(reservation.quantized.values(), reservation.new_slots)

    def filled_slots(self, reservation: Reservation, length: int) -> list[tuple[int, int]]:
        """Return (quantized block, slot to encode) of each block that is quantized if its sequence gets this length."""
        old = range(self.first_visible(length), length // self.block_size - self.recent_blocks)
        blocks = reservation.quantized.items()
        return [(block, reservation.slots[number]) for number, block in blocks if number in old]

    def commit(self, table: BlockTable, reservation: Reservation, length: int) -> None:
        complete, rest = divmod(length, self.block_size)
        # Most steps only append to the current slot.
        if rest and not reservation.quantized and not reservation.new_slots:
            self.leave_window(table, length)
            return
        slots, kept = reservation.slots, complete - self.recent_blocks
        held = {*self.held_slots(table), *slots.values()}
        table.current = slots[complete] if rest else None
        if complete and 0 in slots:
            table.sink = slots[0]
        table.quantized += [block for number, block in reservation.quantized.items() if number < kept]
        quantized = {number for number in reservation.quantized if number < kept}
        table.recent = [slot for number, slot in slots.items() if 0 < number < complete and number not in quantized]
        table.dropped = max(0, complete - 1) - len(table.quantized) - len(table.recent)
        unused = [block for number, block in reservation.quantized.items() if number >= kept]
        self._release(unused, sorted(held - {table.current, table.sink, *table.recent}))
        self.leave_window(table, length)

    def leave_window(self, table: BlockTable, length: int) -> None:
        """Release the blocks that no token after `length` tokens can see."""
        if self.window is None:
            return
        first = self.first_visible(length)
        if table.sink is not None and first > 0:
            self.full.release(table.sink)
            table.sink = None
        count = max(0, first - 1 - table.dropped)
        recent = max(0, count - len(table.quantized))
        self._release(table.quantized[:count], table.recent[:recent])
        table.dropped += min(count, len(table.quantized) + len(table.recent))
        table.quantized, table.recent = table.quantized[count:], table.recent[recent:]

    def first_visible(self, length: int) -> int:
        return self.oldest_visible(length) // self.block_size

    def share(self, blocks: Sequence[int | None], recent: Sequence[int], length: int) -> BlockTable:
        """As `LayerState.share`. None stands for a block outside the window of those tokens."""
        first, count = self.first_visible(length), len(blocks) + len(recent)
        table = BlockTable(dropped=max(0, min(first, count) - 1))
        for number, block in enumerate(blocks):
            if number < first:
                continue
            assert block is not None
            (self.quantized if number else self.full).retain(block)
            if number:
                table.quantized.append(block)
            else:
                table.sink = block
        table.recent = [*recent[max(0, first - len(blocks)) :]]
        for slot in table.recent:
            self.full.retain(slot)
        return table

    def reserve_table(self, length: int, dropped: int, recent: int, *, with_sink: bool) -> BlockTable:
        n, oldest = self.block_size, self.oldest_visible(length)
        complete, rest = divmod(length, n)
        quantized = max(0, complete - 1) - dropped - recent
        lacks_sink = complete > 0 and oldest < n and not with_sink
        if quantized < 0 or not 0 <= dropped <= max(0, oldest // n - 1) or lacks_sink or (with_sink and not complete):
            raise ValueError(
                f"{length} tokens cannot have {quantized} quantized blocks and {dropped} outside the window"
            )
        table = BlockTable(quantized=self.quantized.allocate(quantized), dropped=dropped)
        try:
            slots = self.full.allocate(with_sink + recent + (rest > 0))
        except OutOfBlocks as error:
            self.release(table)
            raise OutOfSlots(str(error)) from None
        table.sink = slots.pop() if with_sink else None
        table.current = slots.pop() if rest else None
        table.recent = slots
        return table

    def release(self, table: BlockTable) -> None:
        """As `LayerState.release`. Quantized blocks go last first, so that the last ones are reused first: each needs
        the blocks before it. Recent blocks go first first: those are quantized then."""
        self._release(
            table.quantized[::-1], [*table.recent, *(slot for slot in (table.current, table.sink) if slot is not None)]
        )

    def _release(self, quantized: Iterable[int], full: Iterable[int]) -> None:
        for block in quantized:
            self.quantized.release(block)
        for slot in full:
            self.full.release(slot)
            if slot in self.ahead and not self.full.references(slot):
                self.quantized.release(self.ahead.pop(slot))
