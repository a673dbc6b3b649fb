"""The device of tests of the CUDA ops: the emulator, or a GPU if the environment has TESTS_GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np

from polarlm.engine.backends.cuda.device import NUMBERS, Addresses, Device, PaddedInput, PeerCopy
from tests.cuda.formats import poisoned, read
from tests.cuda_emulator import Program

_KINDS = {"float32": "float", "float16": "__half", "uint16": "__nv_bfloat16"}


@cache
def program_of(text: str, checked: bool) -> Program:
    return Program(text, checked=checked)


class DeviceArray:
    """Memory of an emulated device: what `engine.backends.cuda.device.Array` has, and no more.

    As CuPy's arrays it is none of NumPy's, and only numbers and other arrays of the device are assigned to it.
    """

    __array_ufunc__ = None

    def __init__(self, device: Any, memory: np.ndarray):
        self.device, self.memory = device, memory

    def __getattr__(self, name: str) -> Any:
        if name not in {"shape", "dtype", "strides", "size", "nbytes", "itemsize", "ndim", "flags"}:
            raise AttributeError(f"an array of a device has no {name}")
        return getattr(self.memory, name)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("an array of a device becomes one of the host by to_host alone")

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, place: Any) -> DeviceArray:
        return DeviceArray(self.device, np.asarray(self.memory[place]))

    def __setitem__(self, place: Any, x: DeviceArray | float) -> None:
        self.memory[place] = x if isinstance(x, int | float) else self.device.memory_of(x)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.device, self.memory.reshape(*shape))

    def copy(self) -> DeviceArray:
        return self.device.from_device(self, self.device)

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.device, self.memory.view(dtype))


class EmulatedDevice:
    """See `engine.backends.cuda.device.Device`. New arrays hold NaN, so that reads of unwritten memory show.

    It works on no arrays but its own. broken: the error of all further work, as after an access out of bounds.
    """

    name = "emulated GPU"
    processors = 6
    seed = 0  # the order of threads and blocks: see `Program.launch`
    shared_memory = 228 << 10
    overlaps = False

    def __init__(self, *, checked: bool = True):
        """checked: with the emulator's checks; launches take less than half the time without."""
        self._checked = checked
        self.launches: list[str] = []
        self.broken: Exception | None = None

    def use(self) -> None:
        """There is one device."""

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def memory_of(self, x: DeviceArray) -> np.ndarray:
        if not isinstance(x, DeviceArray):
            raise TypeError(f"{type(x).__name__} is no array of the device")
        assert x.device is self, "an array of another device"
        if self.broken is not None:
            raise self.broken
        return x.memory

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        kind = _KINDS.get(np.dtype(dtype).name)
        return self._new(np.full(shape, np.iinfo(dtype).max, dtype) if kind is None else poisoned(shape, kind))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        zeros = self.empty(shape, dtype)
        zeros[...] = 0
        return zeros

    def _new(self, memory: np.ndarray) -> DeviceArray:
        return DeviceArray(self, memory)

    def from_host(self, x: np.ndarray) -> DeviceArray:
        assert isinstance(x, np.ndarray)
        assert x.flags.c_contiguous
        return self._new(np.array(x))

    def to_host(self, x: DeviceArray) -> np.ndarray:
        return self.memory_of(x).copy()

    def to_host_later(self, x: DeviceArray) -> tuple[DeviceArray, Callable[[], np.ndarray]]:
        copy = self._new(self.memory_of(x).copy())
        return copy, copy.memory.copy

    def from_device(self, x: DeviceArray, device: Device) -> DeviceArray:
        assert isinstance(device, EmulatedDevice)
        return self._new(device.memory_of(x).copy())

    def wait(self) -> None:
        """Launches are synchronous."""

    def lasting_error(self) -> Exception | None:
        return self.broken

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        assert all(size > 0 for size in (*grid, *block)), f"{kernel}: nothing to launch, {grid} × {block}"
        self.launches.append(kernel)
        self.run(text, kernel, grid, block, [self._argument(arg) for arg in args], shared)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Addresses):
            return arg._replace(rows=[[x if x is None else self.memory_of(x) for x in row] for row in arg.rows])
        if type(arg) in NUMBERS:
            return arg if isinstance(arg, np.generic) else np.dtype(NUMBERS[type(arg)]).type(arg)
        return arg if arg is None else self.memory_of(arg)

    def run(self, text: str, kernel: str, grid: Sequence[int], block: Sequence[int], args: list, shared: int) -> None:
        program_of(text, self._checked).launch(kernel, grid, block, *args, shared=shared, seed=self.seed)

    def expect(self, text: str) -> None:
        """Texts are compiled when they are launched."""

    def wait_for(self, text: str) -> None:
        """No text is expected."""

    def gemm(
        self, y: DeviceArray, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None = None, /, *, add: bool
    ) -> None:
        """Nearly always the same for a row, whatever the number of rows: sums are float64."""
        assert x.dtype == weight.dtype
        assert y.dtype == np.float32
        assert all(array.flags.c_contiguous for array in (x, weight))
        self.launches.append("gemm")
        left, right = (read(self.memory_of(array), _KINDS[x.dtype.name]).astype(np.float64) for array in (x, weight))
        product, result = left @ right.T + (0 if bias is None else self.memory_of(bias)), self.memory_of(y)
        result[...] = result + product if add else product

    def call_host(self, work: Callable[..., np.ndarray], y: DeviceArray, arrays: Sequence[DeviceArray]) -> None:
        self.launches.append("host")
        assert all(array.flags.c_contiguous for array in (y, *arrays))
        self.memory_of(y)[...] = work(*map(self.to_host, arrays))

    def forget(self) -> None:
        """Nothing is recorded."""

    def run_between_graphs(
        self, work: Callable[..., None], arrays: Sequence[DeviceArray], *, is_last: bool = False
    ) -> None:
        assert all(array.flags.c_contiguous for array in arrays)
        work(*arrays)

    def _input(self, x: np.ndarray | PaddedInput | PeerCopy) -> DeviceArray:
        if not isinstance(x, PaddedInput | PeerCopy):
            return self.from_host(x)
        array = self.from_host(x.filler) if isinstance(x, PaddedInput) else self.zeros(x.shape, x.array.dtype)
        array[: len(x.array)] = x.array if x.device is self else self.from_device(x.array, x.device)
        return array

    def run_graph(
        self, key: Hashable, work: Callable[..., Any], inputs: Sequence[np.ndarray | PaddedInput | PeerCopy]
    ) -> Any:
        hash(key)
        return work(*map(self._input, inputs))

    def reserve_workspace(self, size: int) -> None:
        pass


def open_device(*, checked: bool = True) -> Device:
    if os.environ.get("TESTS_GPU"):
        from polarlm.engine.backends.cuda.device.cupy_device import open_device as open_gpu

        return open_gpu()
    return EmulatedDevice(checked=checked)
