"""Large arrays of zeros, most of whose pages are written late or never."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np

_LEAST = 1 << 16  # bytes; for smaller arrays own pages do not pay
_HUGE = 1 << 22  # bytes; NumPy requests huge pages from the same size on


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """As `np.zeros`, but the pages of a large array take no memory until they are written. Raises MemoryError.

    `np.zeros` does not promise that: the C library may reuse freed memory and overwrite it with zeros.
    """
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _LEAST or not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where large arrays get fresh memory
        return np.zeros(shape, kind)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"There is no memory for an array of {nbytes:,} bytes") from error
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind).reshape(shape)
