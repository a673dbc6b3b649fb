"""Kernels are compiled before they are needed: those that a trace of the first requests launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.cuda.device import Device
from polarlm.engine.backends.cuda.device.tracing import Launch
from polarlm.engine.weight_formats import StoredMatrix, WeightFormat


class ExpectedKernels:
    """The texts of launches, which devices compile in the background."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._texts: dict[str, None] = {}  # in the order of need

    def add(self, launch: Launch) -> None:
        """Expect the text of a launch; a library's product has none."""
        if launch.text and launch.text not in self._texts:
            self._texts[launch.text] = None
            for device in self._devices:
                device.expect(launch.text)

    def wait(self, progress: Callable[[int, int], None]) -> None:
        """Wait until what has been added so far is compiled; progress(texts done, all) is called on the way."""
        texts = list(self._texts)
        for done, text in enumerate(texts):
            progress(done, len(texts))
            for device in self._devices:
                device.wait_for(text)
        progress(len(texts), len(texts))


@dataclass(frozen=True)
class FirstRow:
    """A matrix for which one row of zeros is loaded, and nothing is read; see `StoredMatrix`."""

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
