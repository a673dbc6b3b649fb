"""Block ids and who holds them. Integers only: what a block contains is the store's business."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class OutOfBlocks(Exception):
    """No free block is left."""


class BlockAllocator:
    """Hands out the ids 0 … size-1, each with a reference count, so that sequences can share blocks.

    A block that nobody holds keeps its contents until it is handed out again. Those whose contents somebody may look
    for (`keep`) go last, the one that has been free the longest first.

    >>> blocks = BlockAllocator(2)
    >>> a, b = blocks.allocate(2)
    >>> blocks.retain(a); blocks.release(a); blocks.free
    0
    >>> blocks.release(a); blocks.free
    1
    """

    def __init__(self, size: int) -> None:
        self._references = [0] * size
        self._free = OrderedDict.fromkeys(range(size))  # in the order in which they will be handed out
        self._kept: dict[int, Callable[[], None]] = {}

    @property
    def size(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """Free blocks whose contents the prefix cache can still find."""
        return sum(block in self._free for block in self._kept)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int = 1) -> list[int]:
        """Ids of `count` blocks, each held once. All or none: raises OutOfBlocks and takes nothing."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} of {self.size} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            if block in self._kept:
                self._kept.pop(block)()
        return taken

    def keep(self, block: int, forget: Callable[[], None]) -> None:
        """The contents of a held block are worth finding; `forget` is called when the block is handed out again."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and cannot be kept")
        self._kept[block] = forget

    def drop(self, block: int) -> None:
        """The contents of a block are not worth finding any more; `forget` is not called."""
        del self._kept[block]
        if self._references[block] == 0:
            self._free.move_to_end(block, last=False)

    def retain(self, block: int) -> None:
        """One more holder of a block that is already held, or whose contents are kept."""
        if self._references[block] == 0:
            if block not in self._kept:
                raise ValueError(f"block {block} is free and cannot be retained")
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the block is free again when the last one lets go."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            self._free.move_to_end(block, last=block in self._kept)
