"""Block ids and their reference counts. Integers only: the contents of blocks are the store's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

Blocks = list[int | None]  # one per group of layers; None if there is none


class OutOfBlocks(Exception):
    """No free block is left."""


class OutOfSlots(OutOfBlocks):
    """No free slot for a block in full precision is left."""


class BlockAllocator:
    """Allocates the ids 0 … size-1, each with a reference count, so that sequences can share blocks.

    A free block keeps its contents until it is allocated again. Blocks that the prefix cache can find (`keep`) are
    allocated last, in the order in which they became free. Guesses, which nobody has found yet, come before the others,
    and then blocks whose `forget` keeps what they hold. Last come the first blocks of sequences, without which no later
    block of a sequence is found, until they are more than three quarters of all blocks. `allocate` is O(count), `kept`
    and `idle` O(size), all else O(1).
    """

    def __init__(self, size: int) -> None:
        self._references = [0] * size
        self._free = OrderedDict.fromkeys(range(size))  # in the order in which they will be allocated
        self._free_firsts: OrderedDict[int, None] = OrderedDict()  # first blocks of sequences, in that order
        self._free_guesses: OrderedDict[int, None] = OrderedDict()
        self._free_copied: OrderedDict[int, None] = OrderedDict()
        self._kept: dict[int, Callable[[], None]] = {}
        self._firsts: set[int] = set()  # kept blocks that are first blocks of sequences
        self._guesses: set[int] = set()  # blocks that were allocated as guesses, and that nobody has found
        self._copied: set[int] = set()  # kept blocks whose contents stay when they are allocated again
        self.gives_up = True  # whether blocks are allocated whose contents are lost to the prefix cache

    @property
    def size(self) -> int:
        """The number of blocks."""
        return len(self._references)

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated now."""
        return len(self._free) + len(self._free_firsts) + len(self._free_guesses) + len(self._free_copied)

    @property
    def idle(self) -> int:
        """The number of free blocks that nobody can find, or that are guesses."""
        return len(self._free) - sum(map(self._kept.__contains__, self._free)) + len(self._free_guesses)

    @property
    def kept(self) -> int:
        """The number of free blocks that the prefix cache can find."""
        return sum(self._references[block] == 0 for block in self._kept)

    def references(self, block: int) -> int:
        """The reference count of a block; 0 if it is free."""
        return self._references[block]

    def allocate(self, count: int = 1, *, are_guesses: bool = False) -> list[int]:
        """Allocate `count` blocks with one reference each and return their ids; all, or none and raise OutOfBlocks.
        are_guesses: whether they go first once they are free, even if they are kept, unless they are found before."""
        free = self.free if self.gives_up else self.idle + len(self._free_copied)
        if count > free:
            raise OutOfBlocks(f"{count} blocks wanted, {free} of {self.size} free")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            (self._guesses.add if are_guesses else self._guesses.discard)(block)
            if block in self._kept:
                self._firsts.discard(block)
                self._copied.discard(block)
                self._kept.pop(block)()
        return blocks

    def _take(self) -> int:
        block = next(iter(self._free), None)
        for others in (self._free_guesses, self._free_copied):
            if others and (block is None or block in self._kept):
                return others.popitem(last=False)[0]
        if block is None or (block in self._kept and 4 * len(self._free_firsts) > 3 * self.size):
            return self._free_firsts.popitem(last=False)[0]
        del self._free[block]
        return block

    def keep(self, block: int, forget: Callable[[], None], *, is_first: bool = False, is_copied: bool = False) -> None:
        """Keep the contents of a held block as long as possible. `forget` is called when it is allocated again.
        is_first: whether it is the complete first block of a sequence. is_copied: whether `forget` keeps its contents
        elsewhere."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and cannot be kept")
        self._kept[block] = forget
        if is_first:
            self._firsts.add(block)
        if is_copied:
            self._copied.add(block)

    def drop(self, block: int) -> None:
        """Undo `keep`, without calling its `forget`."""
        del self._kept[block]
        if self._references[block] == 0:
            self._remove_free(block)
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        self._firsts.discard(block)
        self._copied.discard(block)

    def _remove_free(self, block: int) -> None:
        places = self._free_guesses, self._free_copied, self._free_firsts, self._free
        del next(place for place in places if block in place)[block]

    def retain(self, block: int) -> None:
        """Add a reference to a block that is held, or that is free and kept."""
        if self._references[block] == 0:
            if block not in self._kept:
                raise ValueError(f"block {block} is free and cannot be retained")
            self._remove_free(block)
        self._guesses.discard(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; at zero the block is free."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._kept and block in self._guesses:
                self._free_guesses[block] = None
            elif block in self._copied:
                self._free_copied[block] = None
            elif block in self._firsts:
                self._free_firsts[block] = None
            else:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._kept)


def add_blocks(
    known: Blocks,
    blocks: Blocks,
    allocators: Sequence[BlockAllocator],
    forget: Callable[[int], Callable[[], None]],
    *,
    are_first: bool = False,
    are_copied: bool = False,
) -> None:
    """Put `blocks` into `known` in place of None and of blocks that no sequence holds. are_first, are_copied: as for
    `BlockAllocator.keep`."""
    for index, (allocator, block) in enumerate(zip(allocators, blocks, strict=True)):
        old = known[index]
        if block is None or (old is not None and allocator.references(old)):
            continue
        if old is not None:
            allocator.drop(old)
        known[index] = block
        allocator.keep(block, forget(index), is_first=are_first, is_copied=are_copied)
