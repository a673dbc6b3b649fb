"""Block tables: which block of a sequence lies where. Integers only; the arrays are the store's.

Blocks are numbered from the start of a sequence. Block 0 becomes the *sink* and the block being filled is the *tail*;
both lie in full-precision slots. Complete blocks between them are coded. A sequence grows by `grow`, or
`grow_in_place` for a step (reserve), then `commit` or `abort`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.kv.blocks import BlockAllocator, OutOfBlocks


@dataclass
class BlockTable:
    """Where the blocks of one sequence lie, for the layers of one group. Block i ≥ 1 is coded[i − 1 − dropped]."""

    sink: int | None = None  # full-precision slot
    quantized: list[int] = field(default_factory=list)
    dropped: int = 0  # quantized blocks at the front that left the window
    current: int | None = None  # full-precision slot, held while the current block has tokens

    def block(self, number: int) -> int | None:
        """Where the complete block `number` ≥ 1 lies; None if it left the window."""
        index = number - 1 - self.dropped
        return self.quantized[index] if index >= 0 else None


@dataclass
class Growth:
    """What new tokens may add to one block table: where blocks will lie, by their numbers."""

    slots: dict[int, int]  # full-precision slots; of the current block, this is the table's own once that has tokens
    quantized: dict[int, int]  # quantized blocks that become complete and that a later token sees
    new_slots: list[int]  # of the slots, those taken from the allocator


class TableGroup:
    """The block tables of all layers that see the same window, and the blocks that they share out."""

    def __init__(self, block_size: int, window: int | None, quantized: int, full: int):
        self.block_size = block_size
        self.window = window
        self.quantized = BlockAllocator(quantized)
        self.full = BlockAllocator(full)

    def oldest_visible(self, length: int) -> int:
        """The first position that the token behind `length` tokens, and any later one, can still see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def grow(self, table: BlockTable, start: int, count: int) -> Growth:
        """Reserve room for a prompt's `count` tokens from position `start`, which reach the store when they are all
        there. Raises OutOfBlocks and changes nothing.
        """
        n = self.block_size
        end = start + count
        first, complete, rest = start // n, end // n, end % n
        oldest = self.oldest_visible(end)
        kept = [0] if first == 0 and complete > 0 and oldest < n else []
        kept += [complete] if rest else []
        # The tail's slot goes on with the block it holds. More tokens that complete this block leave the slot as it is
        # until commit, so that aborting has destroyed nothing.
        own = table.current if first in kept else None
        return self._reserve(range(max(1, first, oldest // n), complete), kept, own)

    def grow_in_place(self, table: BlockTable, start: int, count: int) -> Growth:
        """Reserve room for the `count` rows of a step from position `start`, any number of which may be kept: slots for
        all blocks that they touch, and quantized blocks for those that they may fill. Raises OutOfBlocks and changes
        nothing.
        """
        n = self.block_size
        first, complete, last = start // n, (start + count) // n, (start + count - 1) // n
        quantized = [block for block in range(max(1, first), complete) if self.first_visible((block + 1) * n) <= block]
        return self._reserve(quantized, range(first, last + 1), table.current)

    def _reserve(self, quantized: Sequence[int], kept: Sequence[int], own: int | None) -> Growth:
        """Blocks with the numbers `quantized`, and slots for those `kept`: for the first of them `own`, unless None."""
        blocks = self.quantized.allocate(len(quantized))
        try:
            new_slots = self.full.allocate(len(kept) - (own is not None))
        except OutOfBlocks:
            self._release(blocks, ())
            raise
        slots = [*([] if own is None else [own]), *new_slots]
        return Growth(dict(zip(kept, slots, strict=True)), dict(zip(quantized, blocks, strict=True)), new_slots)

    def abort(self, growth: Growth) -> None:
        self._release(growth.quantized.values(), growth.new_slots)

    def filled(self, growth: Growth, length: int) -> list[tuple[int, int]]:
        """Of a step: the quantized blocks that are to be encoded where the sequence has `length` tokens, and the slots
        that they are encoded from.
        """
        visible = range(self.first_visible(length), length // self.block_size)
        return [(block, growth.slots[number]) for number, block in growth.quantized.items() if number in visible]

    def commit(self, table: BlockTable, growth: Growth, length: int) -> None:
        """The sequence has `length` tokens now. What they do not need, or have left behind, is given back."""
        complete, rest = divmod(length, self.block_size)
        held = {slot for slot in (table.current, *growth.slots.values()) if slot is not None}
        table.current = growth.slots[complete] if rest else None
        if complete and 0 in growth.slots:
            table.sink = growth.slots[0]
        table.quantized += [block for number, block in growth.quantized.items() if number < complete]
        table.dropped = max(0, complete - 1) - len(table.quantized)
        unused = [block for number, block in growth.quantized.items() if number >= complete]
        self._release(unused, sorted(held - {table.current, table.sink}))
        self.leave_window(table, length)

    def leave_window(self, table: BlockTable, length: int) -> None:
        """Give back the blocks that nobody behind `length` tokens can see."""
        first = self.first_visible(length)
        if table.sink is not None and first > 0:
            self.full.release(table.sink)
            table.sink = None
        gone = min(len(table.quantized), max(0, first - 1 - table.dropped))
        self._release(table.quantized[:gone], ())
        table.quantized = table.quantized[gone:]
        table.dropped += gone

    def first_visible(self, length: int) -> int:
        """The number of the oldest block that the token behind `length` tokens, and any later one, can still see."""
        return self.oldest_visible(length) // self.block_size

    def share(self, blocks: Sequence[int | None], length: int) -> BlockTable:
        """A table whose complete blocks, of `length` tokens or more, are `blocks`; each gets one more holder.

        None stands for a block that those tokens have left behind.
        """
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

    def release(self, table: BlockTable) -> None:
        """Give back everything the table holds, the last blocks first: they are of no use without the others."""
        self._release(table.quantized[::-1], [slot for slot in (table.current, table.sink) if slot is not None])

    def _release(self, quantized: Iterable[int], full: Iterable[int]) -> None:
        for block in quantized:
            self.quantized.release(block)
        for slot in full:
            self.full.release(slot)
