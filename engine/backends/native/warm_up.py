"""The launcher of a warm-up, which computes nothing: kernels are compiled before requests need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.native.launch import Launcher, PreparedLaunches, Recording
from polarlm.engine.jit.lang import Kernel


class WarmUpLauncher(Launcher):
    """Asks the library for kernels in the order of their launches instead of running them. Results are zeros.

    Ops without kernels do not run either, and no weights are read.
    """

    computes = False

    def __init__(self, launch: Launcher) -> None:
        super().__init__(launch.threads, launch.level)
        self.library, self.input_bits = launch.library, launch.input_bits
        self._kernels: dict[Kernel, None] = {}

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return np.zeros(shape, dtype)

    def run(self, prepared: PreparedLaunches) -> None:
        for kernel, *_ in prepared.launches:
            self._kernels[kernel] = None
            self.library.expect([kernel])

    def can_run(self, kernels: Sequence[Kernel]) -> bool:
        """True: loading waits for these kernels, even where an op could do without them."""
        return True

    def run_numpy(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Zeros like the first argument if that is an array, else None; `op` is not called."""
        return super().run_numpy(lambda: np.zeros_like(args[0]) if isinstance(args[0], np.ndarray) else None)

    def replay(self, recording: Recording) -> None:
        for part in recording.parts:
            if isinstance(part, PreparedLaunches):  # experts that are read when they are chosen are none of a warm-up's
                self.run(part)

    def wait(self, progress: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Wait until all kernels asked for are compiled; see `Library.wait`."""
        self.library.wait(self._kernels, progress)
