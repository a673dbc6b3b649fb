"""Block tables: which block of a sequence lies where. Integers only; the arrays are the store's.

Blocks are numbered from the start of a sequence. Block 0 becomes the *sink* and the block being filled is the *tail*;
both lie in exact slots. Complete blocks between them are coded. A sequence grows by `grow` (reserve), then `commit` or
`abort`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.kv.blocks import BlockAllocator, OutOfBlocks


@dataclass
class BlockTable:
    """Where the blocks of one sequence lie, for the layers of one group. Block i ≥ 1 is coded[i − 1 − dropped]."""

    sink: int | None = None  # exact slot
    coded: list[int] = field(default_factory=list)
    dropped: int = 0  # coded blocks at the front that left the window
    tail: int | None = None  # exact slot, held while the current block has tokens

    def block(self, number: int) -> int | None:
        """Where the complete block `number` ≥ 1 lies; None if it left the window."""
        index = number - 1 - self.dropped
        return self.coded[index] if index >= 0 else None


@dataclass
class Growth:
    """What new tokens will add to one block table."""

    tail: int | None  # slot for the tokens behind the last complete block; in a step, for the block it is in
    sink: int | None  # slot for block 0, when these tokens complete it
    coded: list[int]  # ids for the complete blocks first_coded, first_coded + 1, …
    first_coded: int  # earlier ones are out of the window before anyone reads their codes
    new_slots: list[int]  # exact slots taken from the allocator


class TableGroup:
    """The block tables of all layers that see the same window, and the blocks that they share out."""

    def __init__(self, block_size: int, window: int | None, coded: int, exact: int):
        self.block_size = block_size
        self.window = window
        self.coded = BlockAllocator(coded)
        self.exact = BlockAllocator(exact)

    def oldest_visible(self, length: int) -> int:
        """The first position that the token behind `length` tokens, and any later one, can still see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def grow(self, table: BlockTable, start: int, count: int) -> Growth:
        """Reserve room for `count` tokens from position `start`. Raises OutOfBlocks and changes nothing."""
        n = self.block_size
        end = start + count
        first, complete, rest = start // n, end // n, end % n
        oldest = self.oldest_visible(end)
        fills_sink = first == 0 and complete > 0 and oldest < n
        writes_tail = rest > 0 or (count == 1 and not fills_sink)
        first_coded = max(1, first, oldest // n)
        coded = self.coded.allocate(max(0, complete - first_coded))
        # The tail's slot goes on with the block it holds. More tokens that complete this block leave the slot as it is
        # until commit, so that aborting has destroyed nothing.
        same_block = table.tail is not None and (fills_sink or complete == first or count == 1)
        try:
            new_slots = self.exact.allocate(fills_sink + writes_tail - same_block)
        except OutOfBlocks:
            self._release(coded, ())
            raise
        slots = [*([table.tail] if same_block else []), *new_slots]
        sink = slots.pop(0) if fills_sink else None
        return Growth(slots.pop(0) if writes_tail else None, sink, coded, first_coded, new_slots)

    def abort(self, growth: Growth) -> None:
        self._release(growth.coded, growth.new_slots)

    def commit(self, table: BlockTable, growth: Growth, length: int) -> None:
        """The tokens are in: the sequence has `length` now. What left the window is given back."""
        n = self.block_size
        complete, rest = divmod(length, n)
        if table.tail not in (None, growth.tail, growth.sink):
            self.exact.release(table.tail)
        table.tail = growth.tail
        if table.tail is not None and rest == 0:
            self.exact.release(table.tail)
            table.tail = None
        if growth.sink is not None:
            table.sink = growth.sink
        table.coded += growth.coded
        table.dropped = max(0, complete - 1) - len(table.coded)
        self.leave_window(table, length)

    def leave_window(self, table: BlockTable, length: int) -> None:
        """Give back the blocks that nobody behind `length` tokens can see."""
        first = self.first_visible(length)
        if table.sink is not None and first > 0:
            self.exact.release(table.sink)
            table.sink = None
        gone = min(len(table.coded), max(0, first - 1 - table.dropped))
        self._release(table.coded[:gone], ())
        table.coded = table.coded[gone:]
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
            (self.coded if number else self.exact).retain(block)
            if number:
                table.coded.append(block)
            else:
                table.sink = block
        return table

    def release(self, table: BlockTable) -> None:
        """Give back everything the table holds, the last blocks first: they are of no use without the others."""
        self._release(table.coded[::-1], [slot for slot in (table.tail, table.sink) if slot is not None])

    def _release(self, coded: Iterable[int], exact: Iterable[int]) -> None:
        for block in coded:
            self.coded.release(block)
        for slot in exact:
            self.exact.release(slot)
