"""Emulated GPUs of one machine: each has some memory, and counts what is copied to it and from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from polarlm.engine.backends.cuda.device import Device
from tests.cuda.emulated import DeviceArray, EmulatedDevice


@dataclass
class Traffic:
    """Bytes of each copy from the host, to the host, and from another GPU."""

    uploads: list[int] = field(default_factory=list)
    downloads: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


class LimitedDevice(EmulatedDevice):
    def __init__(self, number: int, room: int = 1 << 30, processors: int = 6):
        super().__init__(checked=False)
        self.name = f"emulated GPU (cuda:{number})"
        self.processors, self._room, self._taken = processors, room, 0
        self.traffic = Traffic()

    def memory(self) -> tuple[int, int]:
        return self._room - self._taken, self._room

    def _new(self, memory: np.ndarray) -> DeviceArray:
        if self._taken + memory.nbytes > self._room:
            raise MemoryError(f"{self.name} has no {memory.nbytes} bytes")
        self._taken += memory.nbytes
        weakref.finalize(memory, self._give_back, memory.nbytes)
        return super()._new(memory)

    def _give_back(self, size: int) -> None:
        self._taken -= size

    def from_host(self, x: np.ndarray) -> DeviceArray:
        self.traffic.uploads.append(x.nbytes)
        return super().from_host(x)

    def to_host(self, x: DeviceArray) -> np.ndarray:
        self.traffic.downloads.append(x.nbytes)
        return super().to_host(x)

    def to_host_later(self, x: DeviceArray) -> tuple[DeviceArray, Callable[[], np.ndarray]]:
        self.traffic.downloads.append(x.nbytes)
        return super().to_host_later(x)

    def from_device(self, x: DeviceArray, device: Device) -> DeviceArray:
        self.traffic.received.append(x.nbytes)
        return super().from_device(x, device)
