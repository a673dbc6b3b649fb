"""A compiled kernel, and its launches: all that the driver reads of one is packed into a buffer. CuPy's call converts
each argument by itself, and it has none for launches that overlap."""

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


class PackedKernel:
    """A kernel that is launched with arguments of the same C types every time, by one thread at a time.

    letters: these types, as letters of `struct`. waits: whether it waits for its predecessor by itself. shared_limit:
    its limit of dynamic shared memory; CUDA's own depends on the kernel's static shared memory, so it is always raised.
    `pack(*start, …)` packs a launch: grid and block, three sizes each; bytes of shared memory; the stream's handle;
    `attribute`; 1 if it may start before its predecessor has ended, else 0; addresses and numbers. `launch(*handles)`
    launches it, and returns the driver's status, 0 for success.
    """

    def __init__(self, driver: Any, function: Any, waits: bool, letters: str) -> None:
        """driver: from `load_driver`. function: CuPy's."""
        self.shared_limit, self.waits, self.letters, self._function = 0, waits, letters, function
        layout = struct.Struct(_CONFIG + letters)
        buffer, places = ctypes.create_string_buffer(layout.size), (ctypes.c_void_p * len(letters))()
        address = ctypes.addressof(buffer)
        for number, letter in enumerate(letters):
            end = struct.calcsize(_CONFIG + letters[: number + 1])
            places[number] = address + end - struct.calcsize(letter)
        self.pack, self.start, self.attribute = layout.pack_into, (buffer, 0), ctypes.addressof(_OVERLAPS)
        self.launch = driver.cuLaunchKernelEx
        self.handles = ctypes.c_void_p(address), ctypes.c_void_p(function.kernel.ptr), places, None

    def allow(self, shared: int) -> None:
        self._function.max_dynamic_shared_size_bytes = self.shared_limit = shared


def type_letters(types: Sequence[type], pointers: Collection[type]) -> str:
    """The C types of arguments of these types, `pointers` among them, as letters of `struct`. Raises TypeError."""
    for kind in types:
        if kind not in pointers and kind not in NUMBERS:
            names = ", ".join(number.__name__ for number in NUMBERS)
            raise TypeError(f"a kernel takes device arrays, None and {names}, not {kind.__name__}")
    return "".join("P" if kind in pointers else NUMBERS[kind] for kind in types)
