"""Emulated GPUs of one machine: each knows its own arrays, and counts what is copied to it and from it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polarlm.engine.backends.cuda.device import Addresses, Carried, Device, Moved
from tests.cuda.emulated import EmulatedDevice


class CardArray(np.ndarray):
    """An array of a card."""

    card: Card | None = None

    def __array_finalize__(self, of: Any) -> None:
        self.card = getattr(of, "card", None)


@dataclass
class Traffic:
    """Bytes of each copy from the host, to the host, and from another card."""

    uploads: list[int] = field(default_factory=list)
    downloads: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


class Card(EmulatedDevice):
    """A GPU that has `room` bytes, and works on no arrays but its own."""

    def __init__(self, number: int, room: int = 1 << 30, processors: int = 6):
        super().__init__(checked=False)
        self.name = f"emulated GPU (cuda:{number})"
        self.processors, self._room, self._taken = processors, room, 0
        self.traffic = Traffic()

    def memory(self) -> tuple[int, int]:
        return self._room - self._taken, self._room

    def empty(self, shape: tuple[int, ...], dtype: Any) -> CardArray:
        return self._own(super().empty(shape, dtype))

    def _own(self, x: np.ndarray) -> CardArray:
        if self._taken + x.nbytes > self._room:
            raise MemoryError(f"{self.name} has no {x.nbytes} bytes")
        own = x.view(CardArray)
        own.card = self
        self._taken += x.nbytes
        weakref.finalize(x, self._give_back, x.nbytes)
        return own

    def _give_back(self, size: int) -> None:
        self._taken -= size

    def _check(self, *arrays: Any) -> None:
        for x in arrays:
            assert x is None or x.card is self, f"an array of another card, or of the host, on {self.name}"

    def from_host(self, x: np.ndarray) -> CardArray:
        assert getattr(x, "card", None) is None, "an array of a card comes from the host"
        self.traffic.uploads.append(x.nbytes)
        return self._own(super().from_host(x))

    def to_host(self, x: np.ndarray) -> np.ndarray:
        self._check(x)
        self.traffic.downloads.append(x.nbytes)
        return np.array(x)

    def to_host_later(self, x: np.ndarray) -> Any:
        self._check(x)
        self.traffic.downloads.append(x.nbytes)
        copy = self._own(np.array(x))
        return copy, lambda: np.array(copy)

    def from_device(self, x: np.ndarray, device: Device) -> CardArray:
        assert isinstance(device, Card)
        device._check(x)
        self.traffic.received.append(x.nbytes)
        return self._own(np.array(x))

    def launch(
        self, kernel: str, text: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int = 0
    ) -> None:
        for arg in args:
            if isinstance(arg, Addresses):
                self._check(*(x for row in arg.rows for x in row))
            elif isinstance(arg, np.ndarray):
                self._check(arg)
        super().launch(kernel, text, grid, block, args, shared)

    def gemm(self, y: np.ndarray, x: np.ndarray, weight: np.ndarray, *, add: bool) -> None:
        self._check(y, x, weight)
        super().gemm(y, x, weight, add=add)

    def run_graph(self, key: Hashable, work: Any, inputs: Sequence[np.ndarray | Carried | Moved]) -> Any:
        for x in inputs:
            if not isinstance(x, np.ndarray):
                assert isinstance(x.device, Card)
                x.device._check(x.array)
        return super().run_graph(key, work, inputs)
