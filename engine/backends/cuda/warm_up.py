"""A device on which nothing runs: what it is asked to launch is compiled for another device, in the background."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from polarlm.engine.backends.cuda.device import Device, Result
from polarlm.engine.weight_formats import StoredMatrix, WeightFormat


class Blank:
    """An array of a warm-up: what it would be, without its memory. What is written to it is lost."""

    def __init__(self, like: np.ndarray) -> None:
        """like: of the same shape, strides and dtype. Nothing reads or writes its elements."""
        self._like = like
        self.shape, self.strides, self.dtype = like.shape, like.strides, like.dtype
        self.size, self.nbytes, self.itemsize, self.ndim = like.size, like.nbytes, like.itemsize, like.ndim

    def __len__(self) -> int:
        return len(self._like)

    def __getitem__(self, place: Any) -> Blank:
        return Blank(self._like[place])

    def __setitem__(self, place: Any, x: Any) -> None:
        """Nothing: there is nowhere to write."""

    def reshape(self, *shape: Any) -> Blank:
        return Blank(self._like.reshape(*shape))

    def view(self, dtype: Any) -> Blank:
        return Blank(self._like.view(dtype))


class WarmUpDevice:
    """See `engine.backends.cuda.device.Device`. It expects the texts of its launches of `device`."""

    def __init__(self, device: Device) -> None:
        self.name, self.processors, self.shared_memory = device.name, device.processors, device.shared_memory
        self.overlaps, self._device = device.overlaps, device
        self._texts: dict[str, None] = {}  # in the order of need

    def wait(self) -> None:
        """Nothing runs."""

    def memory(self) -> tuple[int, int]:
        return self._device.memory()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Blank:
        strides = np.cumprod([np.dtype(dtype).itemsize, *shape[:0:-1]])[::-1].tolist()
        return Blank(as_strided(np.empty(1, dtype), shape, strides[: len(shape)], writeable=False))

    zeros = empty

    def from_host(self, x: np.ndarray) -> Blank:
        return self.empty(x.shape, x.dtype)

    def to_host(self, x: Blank) -> np.ndarray:
        return np.zeros(x.shape, x.dtype)

    def to_host_later(self, x: Blank) -> tuple[Blank, Callable[[], np.ndarray]]:
        return x, lambda: self.to_host(x)

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        if text not in self._texts:
            self._texts[text] = None
            self._device.expect(text)

    def wait_for_all(self, progress: Callable[[int, int], None]) -> None:
        """Wait until what has been expected so far is compiled; progress(texts done, all) is called on the way."""
        texts = list(self._texts)
        for done, text in enumerate(texts):
            progress(done, len(texts))
            self._device.wait_for(text)
        progress(len(texts), len(texts))

    def expect(self, text: str) -> None:
        self._device.expect(text)

    def wait_for(self, text: str) -> None:
        self._device.wait_for(text)

    def gemm(self, y: Blank, x: Blank, weight: Blank, *, add: bool) -> None:
        """Nothing of ours is compiled for it."""

    def run_graph(self, key: Hashable, work: Callable[..., Result], inputs: Sequence[Any]) -> Result:
        return work(*map(self.from_host, inputs))

    def set_aside(self, size: int) -> None:
        """There is no memory."""


@dataclass(frozen=True)
class FirstRow:
    """A matrix of which one row is loaded, zeros, and nothing is read; see `StoredMatrix`."""

    matrix: StoredMatrix

    @property
    def format(self) -> WeightFormat:
        return self.matrix.format

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    def dequantize(self, out: np.ndarray) -> None:
        raise NotImplementedError("a GPU takes the bytes of a file")

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        yield slice(0, 1), np.zeros((1, self.format.size(self.shape[1])), np.uint8)
