"""Opens and describes the GPU, and measures times on it."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from polarlm.bench.result import about_gpu
from polarlm.bench.shapes import LLAMA_8B
from polarlm.engine.backends.cuda.device import Array, Device
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.select import select
from polarlm.model_loaders.config import ModelConfig


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    config: ModelConfig = LLAMA_8B
    block_size: int = 64
    blocks: int = 64  # blocks of random K/V, repeated to fill a cache
    rotated: int = 1 << 30  # least bytes that are read before any are read again: far more than a GPU's caches hold
    copied: int = 1 << 30  # bytes of the copy that measures bandwidth
    gemm: int = 8192  # rows and columns
    rows: tuple[int, ...] = (1, 3, 8, 16, 32, 64, 128, 192, 256)  # rows of a product
    prompts: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens
    depths: tuple[int, ...] = (8, 2048, 32768)  # tokens before generation
    steps: int = 56  # steps of generation
    sequences: tuple[int, ...] = (1, 4, 16, 64)  # asked at the same time
    asked: tuple[int, int] = (128, 64)  # tokens of the prompt of each, and of its answer
    clients: int = 32  # clients of a server
    of_client: tuple[int, int] = (512, 128)  # tokens of the prompt of each client, and of its answer
    runs: int = 7  # runs of each measurement, whose median is taken


WARM_SECONDS = 0.05  # seconds of work before a measurement: an idle GPU lowers its clocks
# Seconds for which the device waits at most, and as a multiple of what the work takes with the host: the host launches
# all of it meanwhile.
HELD_SECONDS, HELD_TIMES = 0.25, 3


class DeviceClock(Protocol):
    """Timing and memory of the device that was opened last."""

    def seconds(self, work: Callable[[], object], runs: int) -> float:
        """The median device time of `work` in seconds, after enough calls for it to be recorded."""

    def held(self, work: Callable[[], object], runs: int) -> float:
        """The same of work that the host waits for, without the host: the device begins when all is launched."""

    def copy(self, to: Array, source: Array) -> None:
        """Copy contiguous arrays of the same size and type."""

    def free(self) -> None:
        """Free the memory of deleted arrays."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. open: makes new ops and their device, whose recorded graphs keep memory for as long as they exist."""

    open: Callable[[], tuple[CudaOps, Device]]
    clock: DeviceClock
    about: dict[str, str]


class CupyClock:
    """Timing by CUDA events on CuPy's current stream."""

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy

    def seconds(self, work: Callable[[], object], runs: int) -> float:
        cuda = self._cupy.cuda
        for _ in range(3):  # the first call compiles, the second records, the third launches the graph
            work()
        started = time.monotonic()
        while time.monotonic() - started < WARM_SECONDS:
            work()
            cuda.runtime.deviceSynchronize()
        stream = cuda.get_current_stream()
        events = [cuda.Event() for _ in range(runs + 2)]
        # The host runs ahead of the device except in the first run, which is not counted.
        for event in events[:-1]:
            event.record(stream)
            work()
        events[-1].record(stream)
        events[-1].synchronize()
        times = [cuda.get_elapsed_time(*pair) for pair in itertools.pairwise(events)]
        return statistics.median(times[1:]) / 1e3

    def held(self, work: Callable[[], object], runs: int) -> float:
        cuda, times = self._cupy.cuda, []
        for _ in range(3):  # as in `seconds`
            started = time.monotonic()
            work()
        seconds = min(HELD_SECONDS, HELD_TIMES * (time.monotonic() - started))
        stream = cuda.get_current_stream()  # the stream of the device that has worked last
        for _ in range(runs):
            first, second = cuda.Event(), cuda.Event()
            stream.launch_host_func(lambda _: time.sleep(seconds), None)
            first.record(stream)
            work()
            second.record(stream)
            second.synchronize()
            times.append(cuda.get_elapsed_time(first, second))
        return statistics.median(times) / 1e3

    def copy(self, to: Array, source: Array) -> None:
        self._cupy.copyto(to, source)

    def free(self) -> None:
        gc.collect()  # a device and its graphs refer to each other
        self._cupy.cuda.runtime.deviceSynchronize()
        self._cupy.get_default_memory_pool().free_all_blocks()


def open_gpu() -> Gpu:
    """The machine's GPU. Raises EngineError, with the reason, if it cannot be used."""
    select("cuda", 0)
    from polarlm.engine.backends.cuda.device.cupy_device import CupyDevice

    def fresh() -> tuple[CudaOps, Device]:
        device = CupyDevice()
        return CudaOps(device), device

    return Gpu(fresh, CupyClock(), about_gpu())
