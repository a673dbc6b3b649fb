"""The memory of the GPU of `tests.cuda.fake_cupy`, and pools of it, as CuPy's are: what was given back is handed out
again to whoever asks next."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.cuda.fake_cupy import Machine

_ROUNDED = 512  # bytes: what pools hand out is a multiple of this


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.status = status


class Memory:
    """Bytes of one cudaMalloc, returned to the machine when the last reference is gone."""

    def __init__(self, machine: Machine, size: int):
        if machine.allocated + size > machine.room:
            raise CUDARuntimeError(2)
        self._bytes = np.empty(size + _ROUNDED, np.uint8)
        self.ptr = -(-self._bytes.ctypes.data // _ROUNDED) * _ROUNDED
        self.size, self.owner, self.number = size, None, machine.current
        machine.memories.add(self)


@dataclass
class UnownedMemory:
    ptr: int
    size: int
    owner: object  # in CuPy, who has to live as long
    device_id: int


@dataclass
class MemoryPointer:
    mem: Any
    offset: int

    @property
    def ptr(self) -> int:
        return self.mem.ptr + self.offset


class Pools:
    """A pool of each GPU; the methods are the current GPU's pool's, as in CuPy."""

    def __init__(self, machine: Machine, allocator: Callable[[int], MemoryPointer] | None = None):
        self._machine, self._allocator = machine, allocator
        self._pools: dict[int, Pool] = {}

    def __getattr__(self, name: str) -> Any:
        if self._machine.current not in self._pools:
            self._pools[self._machine.current] = Pool(self._machine, self._allocator)
        return getattr(self._pools[self._machine.current], name)

    def malloc(self, size: int) -> MemoryPointer:
        return self.__getattr__("malloc")(size)


class _Piece:
    def __init__(self, ptr: int, size: int):
        self.ptr, self.size = ptr, size


class Pool:
    """Allocates the smallest free piece that is large enough and splits off the rest; free neighbours are joined."""

    def __init__(self, machine: Machine, allocator: Callable[[int], MemoryPointer] | None = None):
        self._machine = machine
        self._allocator = allocator or (lambda size: MemoryPointer(Memory(machine, size), 0))
        self._blocks: list[Memory] = []
        self._limit = 0
        self._free: list[tuple[int, int]] = []  # addresses of beginnings and ends

    def malloc(self, size: int) -> MemoryPointer:
        size = -(-size // _ROUNDED) * _ROUNDED
        fitting = [(stop - start, start) for start, stop in self._free if stop - start >= size]
        if fitting:
            whole, start = min(fitting)
            self._free.remove((start, start + whole))
            if whole > size:
                self._free.append((start + size, start + whole))
        else:
            if self._limit and self.total_bytes() + size > self._limit:
                raise MemoryError(f"{size} more bytes are beyond the limit of the pool")
            try:
                block = self._allocator(size).mem
            except CUDARuntimeError:
                self.free_all_blocks()
                try:
                    block = self._allocator(size).mem
                except CUDARuntimeError as error:
                    raise MemoryError from error
            self._blocks.append(block)
            start = block.ptr
        piece = _Piece(start, size)
        weakref.finalize(piece, self._give_back, start, start + size)
        return MemoryPointer(piece, 0)

    def _give_back(self, start: int, stop: int) -> None:
        borders = {border for block in self._blocks for border in (block.ptr, block.ptr + block.size)}
        for free in list(self._free):
            if free[1] == start and start not in borders:
                self._free.remove(free)
                start = free[0]
            elif free[0] == stop and stop not in borders:
                self._free.remove(free)
                stop = free[1]
        self._free.append((start, stop))

    def free_all_blocks(self) -> None:
        """Return allocations that are entirely free to the machine."""
        assert self._machine.recorded is None, "memory is freed while a graph is recorded"
        for block in list(self._blocks):
            whole = block.ptr, block.ptr + block.size
            if whole in self._free:
                self._free.remove(whole)
                self._blocks.remove(block)

    def get_limit(self) -> int:
        """Bytes; 0 for no limit."""
        return self._limit

    def set_limit(self, size: int) -> None:
        self._limit = size

    def total_bytes(self) -> int:
        return sum(block.size for block in self._blocks)

    def free_bytes(self) -> int:
        return sum(stop - start for start, stop in self._free)
