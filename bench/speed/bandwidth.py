"""The rate at which this machine reads memory: a step takes at least its bytes divided by this rate."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES = 512 << 20  # many times the last-level cache


class Memory:
    """A buffer that is read sequentially as a whole."""

    def __init__(self, nbytes: int = _BYTES) -> None:
        self._buffer = np.ones(nbytes // 4, np.int32)  # written, so that its pages exist

    def read_rate(self, threads: int) -> float:
        """Bytes per second that `threads` threads read together.

        They compute the maximum of integers: of NumPy's reductions it comes closest to the hardware, since it keeps
        several vectors in flight.
        """
        parts = np.array_split(self._buffer, threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(np.max, [part[:1] for part in parts]))  # starts the threads
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            return self._buffer.nbytes / (time.perf_counter() - started)
