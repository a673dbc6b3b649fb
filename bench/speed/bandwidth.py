"""How fast this machine reads memory: the least time of a step is its bytes over this rate."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_BYTES = 512 << 20  # many times the last-level cache


class Memory:
    """A buffer that is read as a whole, from one end to the other."""

    def __init__(self, nbytes: int = _BYTES) -> None:
        self._buffer = np.ones(nbytes // 4, np.int32)  # written, so that its pages exist

    def read_rate(self, threads: int) -> float:
        """Bytes a second that `threads` threads read together.

        They look for the largest integer: of NumPy's reductions it comes closest to the hardware, as it keeps several
        vectors in flight.
        """
        parts = np.array_split(self._buffer, threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(np.max, [part[:1] for part in parts]))  # the threads exist
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            return self._buffer.nbytes / (time.perf_counter() - started)
