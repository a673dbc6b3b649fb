"""The device interface of the CUDA ops: memory, launches, one matrix product, graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

# An array on the device: it has shape, dtype, ndim, strides, itemsize, size, nbytes, flags, copy, reshape and view, and
# its slices are views, to which numbers and other arrays of the device are assigned. NumPy cannot read it.
Array = Any
Result = TypeVar("Result")

NUMBERS: dict[type, str] = {int: "i", np.int32: "i", np.int64: "q", float: "f", np.float32: "f"}
"""The types of the numbers that `Device.launch` takes, and the types in C that kernels get, as letters of `struct`."""

MOST_RECORDINGS, MOST_BATCHES = 64, 16
"""The most recordings that a device keeps, least recently used first out; each is a graph of some hundred launches.
Those with calls of `Device.run_between_graphs` are as many graphs as there are layers, and have a limit of their
own."""


class Addresses(NamedTuple):
    """An argument of `Device.launch`: a table of addresses, for a kernel that works on many arrays.

    rows: arrays on the device, or None for null pointers, equally many in each row. The kernel gets uint64 (rows,
    columns). written: the kernel writes this many arrays at the beginning of each row, and only reads the others.
    """

    rows: Sequence[Sequence[Array | None]]
    written: int


class PaddedInput(NamedTuple):
    """An input of `Device.run_graph`: `array` on `device`, this or another one, followed by the rest of `filler` on the
    host."""

    filler: np.ndarray
    array: Array
    device: Device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.filler.shape


class PeerCopy(NamedTuple):
    """An input of `Device.run_graph` with `rows` rows: a copy of `array`, which is on another device, then rows of
    padding with finite numbers, which nothing reads."""

    array: Array
    device: Device
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.array.shape[1:])


class Device(Protocol):
    """One GPU, or a stand-in for it. Work runs in the order of the calls."""

    name: str  # for messages, such as "NVIDIA H200"
    processors: int  # multiprocessors
    shared_memory: int  # bytes of a multiprocessor, shared by its resident blocks
    overlaps: bool  # recorded kernels that wait for their predecessor by themselves are launched before it has ended

    def use(self) -> None:
        """Make this device current in the calling thread: assignments between arrays run on the current device."""

    def memory(self) -> tuple[int, int]:
        """Free bytes, total bytes. Memory that this process has allocated but does not use counts as free."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array, aligned to 256 bytes. Raises MemoryError."""

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of zeros, aligned to 256 bytes. Raises MemoryError."""

    def from_host(self, x: np.ndarray) -> Array:
        """A copy on the device, same dtype; `x` may change afterwards. Raises MemoryError."""

    def to_host(self, x: Array) -> np.ndarray:
        """A copy on the host, same dtype, after all earlier work has finished."""

    def to_host_later(self, x: Array) -> tuple[Array, Callable[[], np.ndarray]]:
        """A device copy of a contiguous array, which no recording overwrites; a function that waits for a host copy."""

    def from_device(self, x: Array, device: Device) -> Array:
        """A copy of a contiguous array of another device, after all earlier work there. Raises MemoryError."""

    def wait(self) -> None:
        """Block until all earlier work has finished."""

    def lasting_error(self) -> Exception | None:
        """The error that every call gets from now on, as after an access out of bounds; None if there is none. Asked
        after an error, outside of `run_graph`."""

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        """Launch `kernel` of the CUDA source `text` with grid and block sizes (1 to 3 each).

        args: device arrays, or None for null pointers; NUMBERS; `Addresses`, not inside `run_graph`. bfloat16 arrays
        have dtype uint16. shared: bytes of dynamic shared memory. Raises TypeError for any other argument, and for one
        of another type in C than in the kernel's launches before.
        """

    def expect(self, text: str) -> None:
        """Compile the CUDA source `text` in the background, for later launches, which raise any error."""

    def wait_for(self, text: str) -> None:
        """Block until the compilation of an expected text has succeeded or failed."""

    def gemm(self, y: Array, x: Array, weight: Array, bias: Array | None = None, /, *, add: bool) -> None:
        """y (T, out) float32 = x (T, in) @ weight (out, in)ᵀ + bias (out,) float32, or += with `add`.

        x and weight are both float16 or both bfloat16, and contiguous; y may be columns of a wider array. Sums are
        float32, in an order that depends on all sizes. Raises MemoryError.
        """

    def call_host(self, work: Callable[..., np.ndarray], y: Array, arrays: Sequence[Array]) -> None:
        """Write work(*arrays on the host), of y's shape and dtype, to y, after all earlier work.

        y and the arrays are contiguous; `work` must not change its arguments. Inside `run_graph`, `work` is called at
        every replay, between two parts of the recording.
        """

    def run_between_graphs(self, work: Callable[..., None], arrays: Sequence[Array], *, is_last: bool = False) -> None:
        """Call work(*arrays), whose launches are not recorded.

        Inside `run_graph`, `work` is called at every replay, between two parts of the recording, with views of the
        arrays, which are contiguous; it must not keep them. is_last: nothing is recorded after it.
        """

    def run_graph(
        self, key: Hashable, work: Callable[..., Result], inputs: Sequence[np.ndarray | PaddedInput | PeerCopy]
    ) -> Result:
        """work(*inputs on the device), or a replay of its launches if this key, shapes and dtypes were seen before.

        The result, a contiguous array or a tuple of them, is valid until the next call. `work` may keep arrays that it
        uploads, but no other arrays that it creates. Raises MemoryError.
        """

    def forget(self) -> None:
        """Drop all recordings, and with them what their work holds."""

    def reserve_workspace(self, size: int) -> None:
        """Allocate `size` contiguous bytes for the memory pool that all recordings share. Raises MemoryError.

        Recordings that need more allocate it when they are recorded.
        """


def row_stride(x: Any) -> np.int64:
    """Elements from one row of x (T, …) to the next. Each row must be contiguous."""
    inner = x.itemsize
    for axis in range(x.ndim - 1, 0, -1):
        assert x.shape[axis] == 1 or x.strides[axis] == inner, "the inner axes of a strided array are contiguous"
        inner *= x.shape[axis]
    # The stride of a single row is arbitrary; NumPy and CuPy report different ones.
    return np.int64(inner // x.itemsize if x.shape[0] == 1 else x.strides[0] // x.itemsize)
