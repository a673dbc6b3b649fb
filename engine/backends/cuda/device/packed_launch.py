"""A compiled kernel, and its launches: all that the driver reads of one is packed into a buffer.

CuPy's own call converts each argument by itself, and it has none for launches that overlap.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection, Sequence
from typing import Any

from polarlm.engine.backends.cuda.device import NUMBERS

_CONFIG = "@7I2PI"  # CUlaunchConfig: grid, block, bytes of shared memory; stream, attributes; how many attributes
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_OVERLAPS = ctypes.create_string_buffer(struct.pack("i4xi60x", _SERIALIZATION, 1))  # CUlaunchAttribute


def load_driver() -> ctypes.CDLL:
    """The library of the NVIDIA driver. Raises OSError."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


class Kernel:
    """A kernel that is launched with arguments of the same C types every time, by one thread at a time.

    seen: the types of arguments in Python that are known to be these. allowed: its limit of dynamic shared memory;
    CUDA's own depends on the kernel's static shared memory, so it is always raised.
    """

    def __init__(self, driver: Any, function: Any, waits: bool, letters: str) -> None:
        """driver: from `load_driver`. function: CuPy's. waits: whether the kernel waits for its predecessor by itself.
        letters: the C types, as letters of `struct`."""
        self.seen: set[tuple[type, ...]] = set()
        self.allowed, self.letters = 0, letters
        self._function, self._waits = function, waits
        layout = struct.Struct(_CONFIG + letters)
        self._buffer = ctypes.create_string_buffer(layout.size)
        start, places = ctypes.addressof(self._buffer), (ctypes.c_void_p * len(letters))()
        for number, letter in enumerate(letters):
            end = struct.calcsize(_CONFIG + letters[: number + 1])
            places[number] = start + end - struct.calcsize(letter)
        self._places, self._overlaps = places, ctypes.addressof(_OVERLAPS)
        self._config, self._handle = ctypes.c_void_p(start), ctypes.c_void_p(function.kernel.ptr)
        self._pack, self._launch = layout.pack_into, driver.cuLaunchKernelEx

    def allow(self, shared: int) -> None:
        self._function.max_dynamic_shared_size_bytes = self.allowed = shared

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], shared: int, stream: int, overlaps: bool, args: Sequence[Any]
    ) -> int:
        """Launch the kernel and return the driver's status, 0 for success. stream: its handle. overlaps: whether a
        kernel that waits by itself may start before its predecessor has ended. args: addresses and numbers."""
        sizes = *(*grid, 1, 1)[:3], *(*block, 1, 1)[:3], shared, stream, self._overlaps, overlaps and self._waits
        self._pack(self._buffer, 0, *sizes, *args)
        status: int = self._launch(self._config, self._handle, self._places, None)
        return status


def letters_of(types: Sequence[type], pointers: Collection[type]) -> str:
    """The C types of arguments of these types, `pointers` among them, as letters of `struct`. Raises TypeError."""
    for kind in types:
        if kind not in pointers and kind not in NUMBERS:
            raise TypeError(f"a kernel takes device arrays, None and numbers of NUMBERS, not {kind.__name__}")
    return "".join("P" if kind in pointers else NUMBERS[kind] for kind in types)
