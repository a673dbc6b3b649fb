"""Launches the kernels of a CUDA text on NumPy arrays, on a GPU: the twin of `tests.cuda_emulator.Program`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from engine.backends.cuda.device import Addresses
from engine.backends.cuda.kernel_source import OPTIONS

_WITHOUT_ASKING = 48 << 10  # bytes of dynamic shared memory that every launch may have


class Program:
    """The kernels of one text. `checked` and `seed` matter only on the emulator."""

    def __init__(self, text: str, *, checked: bool = True):
        self._module = cupy.RawModule(code=text, options=OPTIONS)

    def launch(
        self, name: str, grid: Sequence[int], block: Sequence[int], *args: Any, shared: int = 0, seed: int = 0
    ) -> None:
        """Run kernel `name`; arrays are copied to the device and, where they may be written, back.

        args: as for the emulator.
        """
        kernel = self._module.get_function(name)
        if shared > _WITHOUT_ASKING:
            kernel.max_dynamic_shared_size_bytes = shared
        copies: dict[int, tuple[np.ndarray, Any]] = {}
        values = tuple(_value(arg, copies) for arg in args)
        kernel(tuple(grid), tuple(block), values, shared_mem=shared)
        for base, copy in copies.values():
            if base.flags.writeable:
                base[...] = cupy.asnumpy(copy)


def _value(arg: Any, copies: dict[int, tuple[np.ndarray, Any]]) -> Any:
    if isinstance(arg, Addresses):
        return cupy.asarray(np.array([[_pointer(x, copies) for x in row] for row in arg.rows], np.uint64))
    return _pointer(arg, copies) if arg is None or isinstance(arg, np.ndarray) else arg


def _pointer(array: np.ndarray | None, copies: dict[int, tuple[np.ndarray, Any]]) -> np.uintp:
    """The address of the array in a device copy of its base; views of one base share it."""
    if array is None:
        return np.uintp(0)
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = base.ctypes.data
    if start not in copies:
        copies[start] = (base, cupy.asarray(base))
    return np.uintp(copies[start][1].data.ptr + array.ctypes.data - start)
