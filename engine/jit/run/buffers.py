"""Memory for kernels: an arena for arrays that stay, and a pool for results."""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from contextlib import suppress
from typing import Any

import numpy as np

_LEAST = 1 << 12  # bytes of the smallest array of a pool
MOST = 1 << 26  # bytes of the largest array that a pool keeps
_FEW = 1 << 22  # bytes that a pool does not give back: steps that code a block again use them
_LINE = 64  # bytes of a cache line
_PIECE = 32 << 20  # bytes that an arena requests from the system at a time
_MAPPED = 1 << 16  # bytes from which zeros have pages of their own
_HUGE = 1 << 22  # bytes from which NumPy requests huge pages, too


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """As `np.zeros`, but the pages of a large array take no memory until they are written. Raises MemoryError.

    `np.zeros` does not promise that: the C library may reuse freed memory and overwrite it with zeros.
    """
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _MAPPED or not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where large arrays get fresh memory
        return np.zeros(shape, kind)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"There is no memory for an array of {nbytes:,} bytes") from error
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind).reshape(shape)


def aligned_bytes(nbytes: int) -> np.ndarray:
    """uint8 (nbytes,) zeros from the start of a cache line on; as in `zeros`, pages take memory once written."""
    return _align(zeros((nbytes + _LINE,), np.uint8), nbytes)


def _align(memory: np.ndarray, nbytes: int) -> np.ndarray:
    """`nbytes` bytes of memory, from the start of a cache line on."""
    first = -memory.ctypes.data % _LINE
    return memory[first : first + nbytes]


class Arena:
    """Memory for arrays that stay, cut from large pieces: NumPy requests huge pages for these, which halves the time
    that a core loses to address translation (TLB misses) while it streams through them."""

    def __init__(self) -> None:
        self._rests: list[np.ndarray] = []  # unused rest of each piece

    def take(self, nbytes: int) -> np.ndarray:
        """Uninitialized uint8 (nbytes,), aligned to 64, from the fullest piece that has room."""
        size = -(-nbytes // _LINE) * _LINE
        self._rests.sort(key=len)
        number = next((i for i, left in enumerate(self._rests) if len(left) >= size), None)
        if number is None:
            room = max(size, _PIECE)
            piece = _align(np.empty(room + _LINE, np.uint8), room)
        else:
            piece = self._rests.pop(number)
        if len(piece) > size:
            self._rests.append(piece[size:])
        return piece[:nbytes]


# The address of memory of a pool, and that it is writable, as `__array_interface__` has them; and the memory.
_Piece = tuple[tuple[int, bool], np.ndarray]


class Lease:
    """What the array is based on whose memory a pool lends: it returns to the pool when no array uses it any more."""

    __slots__ = "__array_interface__", "_free_list", "_piece"

    def __init__(self, piece: _Piece, free_list: list[_Piece], shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._piece, self._free_list = piece, free_list
        self.__array_interface__ = {"data": piece[0], "shape": shape, "typestr": dtype.str, "version": 3}

    def __del__(self) -> None:
        self._free_list.append(self._piece)


class BufferPool:
    """A pool of memory for results: fresh pages would cost more time than the kernels that write them. It grows to the
    peak of memory in use, until `give_back`."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[_Piece]] = defaultdict(list)
        self._all: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """An uninitialized array, whose memory returns to the pool when it and all its views are gone."""
        kind = np.dtype(dtype)
        size = _size_class(math.prod(shape) * kind.itemsize)
        if size > MOST:
            return np.empty(shape, kind)
        free = self._free[size]
        try:
            piece = free.pop()
        except IndexError:
            memory = aligned_bytes(size)
            self._all.append(memory)
            piece = (memory.ctypes.data, False), memory
        return np.asarray(Lease(piece, free, shape, kind))

    def give_back(self) -> None:
        """Return the memory to the system, unless it is little, or some array still uses part of it."""
        if self.nbytes > _FEW and len(self._all) == sum(map(len, self._free.values())):
            for free in self._free.values():
                free.clear()
            self._all.clear()

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._all)


def is_leased(x: np.ndarray) -> bool:
    """Whether an array, or the array that it is a view of, comes from a pool."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return isinstance(x.base, Lease)


class _UnownedArray:
    """Memory of an array that somebody else keeps."""

    def __init__(self, x: np.ndarray) -> None:
        self.__array_interface__ = x.__array_interface__


def unowned_view(x: np.ndarray) -> np.ndarray:
    """The same array without a share in its memory, which the caller keeps as long as the array is used."""
    return np.asarray(_UnownedArray(x))


def _size_class(nbytes: int) -> int:
    """nbytes rounded up to a multiple of an eighth of the next power of two."""
    step = max(_LEAST, 1 << max(0, nbytes.bit_length() - 3))
    return max(step, -(-nbytes // step) * step)
