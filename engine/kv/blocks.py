"""Block ids and who holds them. Integers only: what a block contains is the store's business."""

from __future__ import annotations


class OutOfBlocks(Exception):
    """No free block is left."""


class BlockAllocator:
    """Hands out the ids 0 … size-1, each with a reference count, so that sequences can share blocks.

    >>> blocks = BlockAllocator(2)
    >>> a, b = blocks.allocate(2)
    >>> blocks.retain(a); blocks.release(a); blocks.free
    0
    >>> blocks.release(a); blocks.free
    1
    """

    def __init__(self, size: int) -> None:
        self._references = [0] * size
        self._free = list(range(size - 1, -1, -1))  # a stack: low ids first, recently used ids soon again

    @property
    def size(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Ids of `count` blocks, each held once. All or none: raises OutOfBlocks and takes nothing."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} of {self.size} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, block: int) -> None:
        """One more holder of a block that is already held."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and cannot be retained")
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the block is free again when the last one lets go."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)
