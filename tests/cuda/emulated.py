"""The device of tests of the CUDA ops: the emulator, or a GPU if the environment has POLARLM_TEST_GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np

from polarlm.engine.backends.cuda.device import Carried, Device, Moved
from tests.cuda.formats import poisoned, read
from tests.cuda_emulator import Program

_KINDS = {"float32": "float", "float16": "__half", "uint16": "__nv_bfloat16"}


@cache
def _program(text: str, checked: bool) -> Program:
    return Program(text, checked=checked)


class EmulatedDevice:
    """See `engine.backends.cuda.device.Device`. New arrays hold NaN, so that reads of unwritten memory show."""

    name = "emulated GPU"
    processors = 6
    shared_memory = 228 << 10
    overlaps = False
    wgmma = False

    def __init__(self, *, checked: bool = True):
        """checked: with the emulator's checks; launches take less than half the time without."""
        self._checked = checked
        self.launches: list[str] = []

    def use(self) -> None:
        """There is one device."""

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        kind = _KINDS.get(np.dtype(dtype).name)
        if kind is not None:
            return poisoned(shape, kind)
        return np.full(shape, np.iinfo(dtype).max, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        zeros = self.empty(shape, dtype)
        zeros[...] = 0
        return zeros

    def from_host(self, x: np.ndarray) -> np.ndarray:
        assert isinstance(x, np.ndarray)
        assert x.flags.c_contiguous
        return x.copy()

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def to_host_later(self, x: np.ndarray) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
        copy = x.copy()
        return copy, copy.copy

    def from_device(self, x: np.ndarray, device: Device) -> np.ndarray:
        return self.from_host(x)

    def wait(self) -> None:
        """Launches are synchronous."""

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        assert all(size > 0 for size in (*grid, *block)), f"{kernel}: nothing to launch, {grid} × {block}"
        self.launches.append(kernel)
        _program(text, self._checked).launch(kernel, grid, block, *args, shared=shared)

    def expect(self, text: str) -> None:
        """Texts are compiled when they are launched."""

    def wait_for(self, text: str) -> None:
        """No text is expected."""

    def gemm(self, y: np.ndarray, x: np.ndarray, weight: np.ndarray, *, add: bool) -> None:
        assert x.dtype == weight.dtype
        assert y.dtype == np.float32
        assert all(array.flags.c_contiguous for array in (x, weight))
        self.launches.append("gemm")
        kind = _KINDS[x.dtype.name]
        product = read(x, kind) @ read(weight, kind).T
        y[...] = y + product if add else product

    def call_host(self, work: Callable[..., np.ndarray], y: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        self.launches.append("host")
        assert all(array.flags.c_contiguous for array in (y, *arrays))
        y[...] = work(*(array.copy() for array in arrays))

    def _given(self, x: np.ndarray | Carried | Moved) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return self.from_host(x)
        given = self.from_host(x.filler) if isinstance(x, Carried) else self.zeros(x.shape, x.array.dtype)
        given[: len(x.array)] = x.array if x.device is self else self.from_device(x.array, x.device)
        return given

    def run_graph(
        self, key: Hashable, work: Callable[..., np.ndarray], inputs: Sequence[np.ndarray | Carried | Moved]
    ) -> np.ndarray:
        hash(key)
        before = len(self.launches)
        result = work(*map(self._given, inputs))
        assert "gemm" not in self.launches[before:], "a library's product cannot be recorded"
        return result

    def set_aside(self, size: int) -> None:
        pass


def open_device(*, checked: bool = True) -> Device:
    """The device under test."""
    if os.environ.get("POLARLM_TEST_GPU"):
        from polarlm.engine.backends.cuda.device.cupy_device import open_device as open_gpu

        return open_gpu()
    return EmulatedDevice(checked=checked)
