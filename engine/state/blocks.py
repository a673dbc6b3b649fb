"""Block ids and their reference counts. Integers only: the contents of blocks are the store's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

Blocks = list[int | None]  # one per group of layers; None if there is none


class OutOfBlocks(Exception):
    """No free block is left."""


class BlockAllocator:
    """Allocates the ids 0 … size-1, each with a reference count, so that sequences can share blocks.

    A free block keeps its contents until it is allocated again. Blocks that the prefix cache can find (`keep`) are
    allocated last, in the order in which they became free. `allocate` is O(count), `kept` O(kept), all else O(1).

    >>> blocks = BlockAllocator(2)
    >>> a, b = blocks.allocate(2)
    >>> blocks.retain(a); blocks.release(a); blocks.free
    0
    >>> blocks.release(a); blocks.free
    1
    """

    def __init__(self, size: int) -> None:
        self._references = [0] * size
        self._free = OrderedDict.fromkeys(range(size))  # in the order in which they will be allocated
        self._kept: dict[int, Callable[[], None]] = {}

    @property
    def size(self) -> int:
        """The number of blocks."""
        return len(self._references)

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated now."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """The number of free blocks that the prefix cache can find."""
        return sum(block in self._free for block in self._kept)

    def references(self, block: int) -> int:
        """The reference count of a block; 0 if it is free."""
        return self._references[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Allocate `count` blocks with one reference each and return their ids; all, or none and raise OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} of {self.size} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            if block in self._kept:
                self._kept.pop(block)()
        return taken

    def keep(self, block: int, forget: Callable[[], None]) -> None:
        """Keep the contents of a held block as long as possible. `forget` is called when it is allocated again."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and cannot be kept")
        self._kept[block] = forget

    def drop(self, block: int) -> None:
        """Undo `keep`, without calling its `forget`."""
        del self._kept[block]
        if self._references[block] == 0:
            self._free.move_to_end(block, last=False)

    def retain(self, block: int) -> None:
        """Add a reference to a block that is held, or that is free and kept."""
        if self._references[block] == 0:
            if block not in self._kept:
                raise ValueError(f"block {block} is free and cannot be retained")
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; at zero the block is free."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            self._free.move_to_end(block, last=block in self._kept)


def allocate_each(allocators: Sequence[BlockAllocator]) -> list[int] | None:
    """Allocate a block of each allocator; return None, and allocate nothing, if one has no free block."""
    taken: list[int] = []
    try:
        for allocator in allocators:
            taken += allocator.allocate(1)
    except OutOfBlocks:
        for allocator, block in zip(allocators, taken, strict=False):
            allocator.release(block)
        return None
    return taken


def add_blocks(
    known: Blocks, blocks: Blocks, allocators: Sequence[BlockAllocator], forget: Callable[[int], Callable[[], None]]
) -> list[int]:
    """Put `blocks` into `known` in place of None and of blocks that no sequence holds, and return where None was."""
    added = []
    for index, (allocator, block) in enumerate(zip(allocators, blocks, strict=True)):
        old = known[index]
        if block is None or (old is not None and allocator.references(old)):
            continue
        if old is not None:
            allocator.drop(old)
        else:
            added.append(index)
        known[index] = block
        allocator.keep(block, forget(index))
    return added
