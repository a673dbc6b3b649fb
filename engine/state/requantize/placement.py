"""BlockPlacement of blocks of two sizes in one memory. Integers only: the contents of blocks are the store's.

High-precision blocks, which have more bits, lie from the beginning of the memory on, the others before its end. A block
of size s with number i begins at byte i · s, so both kinds are arrays over the whole memory, and each uses a part of
it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple


class BlockPlace(NamedTuple):
    """Where a block is: its number in the array of its kind."""

    is_high_precision: bool
    number: int


class _Kind:
    """The places of one kind: those below `end` are taken, except holes. They are counted from the kind's side."""

    def __init__(self) -> None:
        self.owners: list[int | None] = []
        self.holes: list[int] = []  # a heap, some of whose entries may be at or above the end

    @property
    def end(self) -> int:
        return len(self.owners)

    def hole(self) -> int | None:
        """Return the lowest hole; None if there is none."""
        while self.holes and (self.holes[0] >= self.end or self.owners[self.holes[0]] is not None):
            heapq.heappop(self.holes)
        return self.holes[0] if self.holes else None

    def take(self, owner: int) -> int:
        """Give the lowest hole, or else the place at the end, to `owner`, and return it."""
        at = self.hole()
        if at is None:
            self.owners.append(owner)
            return self.end - 1
        self.owners[at] = owner
        return at

    def free(self, at: int) -> None:
        self.owners[at] = None
        heapq.heappush(self.holes, at)
        while self.owners and self.owners[-1] is None:
            self.owners.pop()


class BlockPlacement:
    """The places of blocks, by the blocks' ids, in memory for `size` blocks of the smaller kind."""

    def __init__(self, size: int, bytes_each: tuple[int, int], move: Callable[[BlockPlace, BlockPlace], None]) -> None:
        """bytes_each: of a high-precision block, and of another one. move(target, source): copies a block's
        contents."""
        self._size, self._move = size, move
        self._high_precision_bytes, self._bytes = bytes_each
        assert self._high_precision_bytes >= self._bytes
        self._kinds = {True: _Kind(), False: _Kind()}
        self._of: dict[int, BlockPlace] = {}
        # The blocks that are being requantized → their places of the other kind, which change when blocks are moved.
        self.coding: dict[int, BlockPlace] = {}
        self.done: dict[int, int] = {}  # how many layers of each of them have been requantized
        self.free = size * self._bytes  # bytes that no block has
        self.changes = 0  # how many times a block has got another place

    def __getitem__(self, block: int) -> BlockPlace:
        return self._of[block]

    def numbers(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the numbers of those blocks that are not high-precision, and of the high-precision ones, in order."""
        numbers: tuple[list[int], list[int]] = [], []
        for is_high_precision, number in map(self._of.__getitem__, blocks):
            numbers[is_high_precision].append(number)
        return numbers

    def counts(self) -> tuple[int, int]:
        """Return how many high-precision blocks there are, and how many others."""
        high_precision, others = (
            sum(owner is not None for owner in self._kinds[kind].owners) for kind in (True, False)
        )
        return high_precision, others - len(self.coding)

    def place(self, block: int, *, is_high_precision: bool) -> None:
        """Give a block without a place one of this kind, for which others may be moved. There must be enough bytes."""
        self._of[block] = self._take(block, is_high_precision=is_high_precision)

    def lower(self, block: int) -> None:
        """Move a high-precision block to the coarse side; its contents are lost."""
        self._free_place(self._of[block])
        self.place(block, is_high_precision=False)
        self.changes += 1

    def begin(self, block: int) -> None:
        """Give a high-precision block a place of the other kind, too, until `finish` or `release`. There must be
        room."""
        self.coding[block], self.done[block] = self._take(block, is_high_precision=False), 0

    def finish(self, block: int) -> None:
        """Let a block that is being requantized have the place of the other kind alone."""
        self._free_place(self._of[block])
        self._of[block] = self.coding.pop(block)
        del self.done[block]
        self.changes += 1

    def give_up(self, block: int) -> None:
        """Free the place of the other kind of a block that is being requantized, if it is."""
        if block in self.coding:
            self._free_place(self.coding.pop(block))
            del self.done[block]

    def _take(self, block: int, *, is_high_precision: bool) -> BlockPlace:
        each = self._each(is_high_precision)
        assert each <= self.free
        kind, other = self._kinds[is_high_precision], self._kinds[not is_high_precision]
        if kind.hole() is None:
            while each * (kind.end + 1) + self._each(not is_high_precision) * other.end > self._size * self._bytes:
                self._lower(not is_high_precision)
        self.free -= each
        return self._at(is_high_precision, kind.take(block))

    def release(self, block: int) -> None:
        """Free a block's places."""
        self.give_up(block)
        self._free_place(self._of.pop(block))

    def _free_place(self, place: BlockPlace) -> None:
        self._kinds[place.is_high_precision].free(self._from_side(place))
        self.free += self._each(place.is_high_precision)

    def _lower(self, is_high_precision: bool) -> None:
        """Move the last block of a kind to a hole of its kind."""
        kind = self._kinds[is_high_precision]
        block = kind.owners[-1]
        assert block is not None
        assert kind.hole() is not None
        source, target = self._at(is_high_precision, kind.end - 1), self._at(is_high_precision, kind.take(block))
        self._move(target, source)
        if self._of[block] == source:
            self._of[block] = target
        else:
            self.coding[block] = target
        self.changes += 1
        kind.free(kind.end - 1)

    def _each(self, is_high_precision: bool) -> int:
        return self._high_precision_bytes if is_high_precision else self._bytes

    def _at(self, is_high_precision: bool, from_side: int) -> BlockPlace:
        return BlockPlace(is_high_precision, from_side if is_high_precision else self._size - 1 - from_side)

    def _from_side(self, place: BlockPlace) -> int:
        return place.number if place.is_high_precision else self._size - 1 - place.number
