"""Memory for the results of ops, used again and again: fresh pages cost more than the ops that write to them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

_LEAST = 1 << 12
MOST = 1 << 26  # bytes of an array that the pool keeps


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed bytes at an aligned address: uint8 (nbytes,)."""
    whole = np.zeros(nbytes + alignment, np.uint8)
    first = -whole.ctypes.data % alignment
    return whole[first : first + nbytes]


class _Lease:
    """Memory that belongs to the pool again once no array uses it."""

    def __init__(self, memory: np.ndarray, home: list[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._memory, self._home = memory, home
        self.__array_interface__ = {
            "data": (memory.ctypes.data, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        self._home.append(self._memory)


class Buffers:
    """A pool of memory. It grows to the most that was in use at a time."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._all: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """An array with arbitrary contents; its memory returns to the pool when it and all its views are gone."""
        kind = np.dtype(dtype)
        size = _size_class(math.prod(shape) * kind.itemsize)
        if size > MOST:
            return np.empty(shape, kind)
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = aligned(size)
            self._all.append(memory)
        return np.asarray(_Lease(memory, free, shape, kind))

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, free and in use."""
        return sum(memory.nbytes for memory in self._all)


def is_leased(x: np.ndarray) -> bool:
    """Whether an array, or the array that it is a view of, comes from a pool."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return isinstance(x.base, _Lease)


def _size_class(nbytes: int) -> int:
    """nbytes, rounded up to a multiple of an eighth of the power of two above it."""
    step = max(_LEAST, 1 << max(0, nbytes.bit_length() - 3))
    return max(step, -(-nbytes // step) * step)
