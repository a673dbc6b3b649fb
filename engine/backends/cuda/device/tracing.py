"""A device on which nothing runs: its arrays have shapes and no memory, and it reports every launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from polarlm.engine.backends.cuda.device import PaddedInput, PeerCopy, Result

GEMM = "gemm"


class TracedLaunch(NamedTuple):
    """The arguments of `Device.launch`. A product of `Device.gemm` is a launch of GEMM without a text, whose args are
    its arrays."""

    kernel: str
    text: str
    grid: Sequence[int]
    block: Sequence[int]
    args: Sequence[Any]
    shared: int


class TracingArray:
    """The shape, strides and dtype of an array without memory. Writes to it are lost."""

    def __init__(self, like: np.ndarray) -> None:
        """like: of the same shape, strides and dtype. Nothing reads or writes its elements."""
        self._like = like
        self.shape, self.strides, self.dtype = like.shape, like.strides, like.dtype
        self.size, self.nbytes, self.itemsize, self.ndim = like.size, like.nbytes, like.itemsize, like.ndim

    def __len__(self) -> int:
        return len(self._like)

    def __getitem__(self, place: Any) -> TracingArray:
        return TracingArray(self._like[place])

    def __setitem__(self, place: Any, x: Any) -> None:
        """Nothing: there is nowhere to write."""

    def reshape(self, *shape: Any) -> TracingArray:
        return TracingArray(self._like.reshape(*shape))

    def view(self, dtype: Any) -> TracingArray:
        return TracingArray(self._like.view(dtype))


class TracingDevice:
    """See `engine.backends.cuda.device.Device`."""

    name = "traced GPU"

    def __init__(
        self,
        on_launch: Callable[[TracedLaunch], None],
        processors: int,
        shared_memory: int,
        memory: tuple[int, int] = (1 << 40, 1 << 40),
        overlaps: bool = False,
    ) -> None:
        """on_launch: is called with every launch. The rest describes the GPU that the launches are meant for."""
        self._on_launch, self._memory = on_launch, memory
        self.processors, self.shared_memory, self.overlaps = processors, shared_memory, overlaps

    def use(self) -> None:
        """Nothing runs."""

    def memory(self) -> tuple[int, int]:
        return self._memory

    def empty(self, shape: tuple[int, ...], dtype: Any) -> TracingArray:
        strides = np.cumprod([np.dtype(dtype).itemsize, *shape[:0:-1]])[::-1].tolist()
        return TracingArray(as_strided(np.empty(1, dtype), shape, strides[: len(shape)], writeable=False))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> TracingArray:
        return self.empty(shape, dtype)

    def from_host(self, x: np.ndarray) -> TracingArray:
        return self.empty(x.shape, x.dtype)

    def to_host(self, x: TracingArray) -> np.ndarray:
        return np.zeros(x.shape, x.dtype)

    def to_host_later(self, x: TracingArray) -> tuple[TracingArray, Callable[[], np.ndarray]]:
        return x, lambda: self.to_host(x)

    def from_device(self, x: TracingArray, device: Any) -> TracingArray:
        return self.empty(x.shape, x.dtype)

    def wait(self) -> None:
        """Nothing runs."""

    def lasting_error(self) -> None:
        """Nothing fails."""

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        self._on_launch(TracedLaunch(kernel, text, grid, block, args, shared))

    def expect(self, text: str) -> None:
        """Nothing is compiled."""

    def wait_for(self, text: str) -> None:
        """No text is expected."""

    def gemm(self, *arrays: TracingArray | None, add: bool) -> None:
        self._on_launch(TracedLaunch(GEMM, "", (), (), arrays, 0))

    def call_host(self, work: Callable[..., np.ndarray], y: TracingArray, arrays: Sequence[TracingArray]) -> None:
        work(*map(self.to_host, arrays))

    def run_between_graphs(
        self, work: Callable[..., None], arrays: Sequence[TracingArray], *, is_last: bool = False
    ) -> None:
        work(*arrays)

    def forget(self) -> None:
        """Nothing is recorded."""

    def run_graph(
        self, key: Hashable, work: Callable[..., Result], inputs: Sequence[np.ndarray | PaddedInput | PeerCopy]
    ) -> Result:
        hosts = (x.filler if isinstance(x, PaddedInput) else x for x in inputs)
        return work(*(self.empty(x.shape, x.array.dtype if isinstance(x, PeerCopy) else x.dtype) for x in hosts))

    def reserve_workspace(self, size: int) -> None:
        """There is no memory."""
