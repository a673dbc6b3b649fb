"""Launches of the kernels in `cuda/`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Device
from polarlm.engine.backends.cuda.device.kernel_source import OVERLAPS, source
from polarlm.engine.records import Layout
from polarlm.engine.weight_formats import Matrix

WARP = 32
MOST_THREADS = 1024


class LaunchConfig(NamedTuple):
    """The constants (DEFINES) that a kernel is compiled with, threads per block, bytes of dynamic shared memory."""

    defines: Mapping[str, int | float | str]
    threads: int
    shared: int = 0


class Product(NamedTuple):
    """The arguments of `linear` besides x, for one matrix. add: to y instead of overwriting it. second: a matrix of
    another packed format, whose columns of y follow the columns of `weight`."""

    weight: Matrix
    bias: Any | None
    norm: tuple[Any, float] | None
    add: bool
    activation: str | None
    second: Matrix | None = None

    def with_types(self, y: Any, config: LaunchConfig) -> LaunchConfig:
        """`config` of one of our own kernels with the DEFINES of this product into y."""
        flags: dict[str, int | str] = {"WEIGHT": self.weight.format.name, "ADD": int(self.add), **_RESULTS[y.dtype]}
        flags["NORMED"] = int(self.norm is not None)
        if self.activation is not None:
            flags["ACTIVATION"] = self.activation
        if self.second is not None:
            flags["SECOND"] = self.second.format.name
        return LaunchConfig({**flags, **config.defines}, config.threads, config.shared)


class Launcher:
    """Launches kernels of `cuda/` on a device."""

    def __init__(self, device: Device):
        self._device = device
        self._defines = {OVERLAPS: 1} if device.overlaps else {}
        self._counts: dict[int, Any] = {}
        self._halves: Any = ()
        self._buffers: list[Any] = []  # earlier, smaller ones, too

    def __call__(
        self,
        kernel: str,
        grid: tuple[int, ...],
        config: LaunchConfig,
        *args: Any,
        file: str = "",
        layouts: tuple[Layout | None, Layout | None] = (None, None),
    ) -> None:
        """Launch `<kernel>_kernel` of the file `<kernel>.cu`, or of `<file>.cu`.

        args: as for `Device.launch`. layouts: of keys and values, for a kernel that reads or writes records.
        """
        text = _source(file or kernel, *layouts, **config.defines, **self._defines)
        self._device.launch(f"{kernel}_kernel", text, grid, (config.threads,), args, config.shared)

    def counts(self, size: int) -> Any:
        """At least `size` int32 zeros. Kernels reset them to zero; they are never freed, since recordings use them."""
        size = 1 << (size - 1).bit_length()
        if size not in self._counts:
            self._counts[size] = self._device.from_host(np.zeros(size, np.int32))
        return self._counts[size]

    def halves(self, size: int) -> Any:
        """`size` numbers in half precision that a launch writes for the next one. All share them, recordings as well,
        and they are never freed."""
        if len(self._halves) < size:
            self._halves = self._device.from_host(np.zeros(1 << (size - 1).bit_length(), np.float16))
            self._buffers.append(self._halves)
        return self._halves[:size]


class DeviceOps:
    def __init__(self, device: Device) -> None:
        self._device, self._launch = device, Launcher(device)


_TYPES = {np.dtype(np.float32): "float", np.dtype(np.float16): "__half", np.dtype(np.uint16): "__nv_bfloat16"}
_RESULTS = {dtype: {} if dtype == np.float32 else {"TO": name} for dtype, name in _TYPES.items()}
_source = lru_cache(maxsize=None, typed=True)(source)


def type_of(x: Any) -> str:
    """The CUDA type of an array's elements. NumPy has no bfloat16, so its bits are stored as uint16."""
    return _TYPES[x.dtype]


def result_type(y: Any) -> dict[str, str]:
    """The DEFINES of a kernel that writes y: none if that is float32."""
    return _RESULTS[y.dtype]


@cache
def threads_for(work: int, most: int = 256) -> int:
    """`work` rounded up to whole warps, at most `most`."""
    return min(most, -(-work // WARP) * WARP)
