"""Where blocks of two sizes lie in one memory. Integers only: the contents of blocks are the store's.

High-precision blocks, the larger ones, grow from the beginning of the memory, low-precision blocks from its end. A
block of size s with number i begins at byte i · s, so both kinds are arrays over the whole memory, and each uses a part
of it.
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
    """The places of one kind, by their index from its end of the memory: those below `end` are taken, except holes."""

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
        index = self.hole()
        if index is None:
            self.owners.append(owner)
            return self.end - 1
        self.owners[index] = owner
        return index

    def free(self, index: int) -> None:
        self.owners[index] = None
        heapq.heappush(self.holes, index)
        while self.owners and self.owners[-1] is None:
            self.owners.pop()


class BlockPlacement:
    """The places of blocks, by their ids, in memory for `size` low-precision blocks."""

    def __init__(self, size: int, bytes_each: tuple[int, int], move: Callable[[BlockPlace, BlockPlace], None]) -> None:
        """bytes_each: of a high-precision block, and of a low-precision one. move(target, source): copies a block's
        contents."""
        self._size, self._move = size, move
        self._high_precision_bytes, self._bytes = bytes_each
        assert self._high_precision_bytes >= self._bytes
        self._kinds = {True: _Kind(), False: _Kind()}
        self._places: dict[int, BlockPlace] = {}
        # The blocks that are being requantized → their low-precision places, which change when blocks are moved.
        self.targets: dict[int, BlockPlace] = {}
        self.layers_done: dict[int, int] = {}  # how many layers of each of them have been requantized
        self.free = size * self._bytes  # bytes that no block has
        self.changes = 0  # how many times a block has got another place

    def __getitem__(self, block: int) -> BlockPlace:
        return self._places[block]

    def numbers(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the numbers of the low-precision blocks among these, and of the high-precision ones, in order."""
        numbers: tuple[list[int], list[int]] = [], []
        for is_high_precision, number in map(self._places.__getitem__, blocks):
            numbers[is_high_precision].append(number)
        return numbers

    def counts(self) -> tuple[int, int]:
        """Return how many high-precision blocks there are, and how many low-precision ones."""
        high, low = (sum(owner is not None for owner in self._kinds[kind].owners) for kind in (True, False))
        return high, low - len(self.targets)

    def place(self, block: int, *, is_high_precision: bool) -> None:
        """Give a new block a place of this kind, for which others may be moved. There must be enough bytes."""
        self._places[block] = self._take(block, is_high_precision=is_high_precision)

    def lower(self, block: int) -> None:
        """Make a high-precision block low-precision; its contents are lost."""
        self._free_place(self._places[block])
        self.place(block, is_high_precision=False)
        self.changes += 1

    def begin(self, block: int) -> None:
        """Give a high-precision block a low-precision place, too, until `finish` or `release`. There must be room."""
        self.targets[block], self.layers_done[block] = self._take(block, is_high_precision=False), 0

    def finish(self, block: int) -> None:
        """Let a block that is being requantized have its low-precision place alone."""
        self._free_place(self._places[block])
        self._places[block] = self.targets.pop(block)
        del self.layers_done[block]
        self.changes += 1

    def give_up(self, block: int) -> None:
        """Free the low-precision place of a block that is being requantized, if it is."""
        if block in self.targets:
            self._free_place(self.targets.pop(block))
            del self.layers_done[block]

    def _take(self, block: int, *, is_high_precision: bool) -> BlockPlace:
        each = self._bytes_each(is_high_precision)
        assert each <= self.free
        kind, other = self._kinds[is_high_precision], self._kinds[not is_high_precision]
        if kind.hole() is None:
            other_each = self._bytes_each(not is_high_precision)
            while each * (kind.end + 1) + other_each * other.end > self._size * self._bytes:
                self._fill_hole(not is_high_precision)
        self.free -= each
        return self._place_at(is_high_precision, kind.take(block))

    def release(self, block: int) -> None:
        """Free a block's places."""
        self.give_up(block)
        self._free_place(self._places.pop(block))

    def _free_place(self, place: BlockPlace) -> None:
        self._kinds[place.is_high_precision].free(self._index(place))
        self.free += self._bytes_each(place.is_high_precision)

    def _fill_hole(self, is_high_precision: bool) -> None:
        """Move the last block of a kind to a hole of its kind."""
        kind = self._kinds[is_high_precision]
        block = kind.owners[-1]
        assert block is not None
        assert kind.hole() is not None
        source = self._place_at(is_high_precision, kind.end - 1)
        target = self._place_at(is_high_precision, kind.take(block))
        self._move(target, source)
        if self._places[block] == source:
            self._places[block] = target
        else:
            self.targets[block] = target
        self.changes += 1
        kind.free(kind.end - 1)

    def _bytes_each(self, is_high_precision: bool) -> int:
        return self._high_precision_bytes if is_high_precision else self._bytes

    def _place_at(self, is_high_precision: bool, index: int) -> BlockPlace:
        return BlockPlace(is_high_precision, index if is_high_precision else self._size - 1 - index)

    def _index(self, place: BlockPlace) -> int:
        return place.number if place.is_high_precision else self._size - 1 - place.number
