"""Launches the kernels of a CUDA text on NumPy arrays, on a GPU: the twin of `tests.cuda_emulator.Program`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from polarlm.engine.backends.cuda.device import Addresses, Device


@cache
def _device() -> Device:
    from polarlm.engine.backends.cuda.device.cupy_device import open_device  # it needs CuPy

    return open_device()


def capability() -> tuple[int, int]:
    from polarlm.engine.backends.cuda.device.cupy_device import _capability

    return _capability()


class Program:
    """The kernels of one text. `checked` and `seed` matter only on the emulator."""

    def __init__(self, text: str, *, checked: bool = True):
        self._text = text

    def launch(
        self, name: str, grid: Sequence[int], block: Sequence[int], *args: Any, shared: int = 0, seed: int = 0
    ) -> None:
        """Run kernel `name`; arrays are copied to the device and, where they may be written, back.

        args: as for the emulator.
        """
        copies: dict[int, tuple[np.ndarray, Any]] = {}
        values = [_value(arg, copies) for arg in args]
        _device().launch(name, self._text, grid, block, values, shared)
        for base, copy in copies.values():
            if base.flags.writeable:
                base[...] = _device().to_host(copy).view(base.dtype).reshape(base.shape)


def _value(arg: Any, copies: dict[int, tuple[np.ndarray, Any]]) -> Any:
    if isinstance(arg, Addresses):
        return arg._replace(rows=[[_copy(x, copies) for x in row] for row in arg.rows])
    return _copy(arg, copies) if isinstance(arg, np.ndarray) else arg


def _copy(array: np.ndarray | None, copies: dict[int, tuple[np.ndarray, Any]]) -> Any:
    """What lies from the beginning of the array on, in a device copy of its base; views of one base share it."""
    if array is None:
        return None
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert base.flags.c_contiguous
    start = base.ctypes.data
    if start not in copies:
        copies[start] = base, _device().from_host(base.reshape(-1).view(np.uint8))
    rest = copies[start][1][array.ctypes.data - start :]
    return rest[: len(rest) // array.itemsize * array.itemsize].view(array.dtype)
