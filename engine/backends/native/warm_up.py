"""Launches of a run that computes nothing, so that its kernels are compiled before they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from polarlm.engine.backends.native.launch import CannotRecord, Launcher, Op, Recording, Units
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.records import Record


class WarmUpLauncher(Launcher):
    """Asks the library for kernels instead of running them, in the order of the launches. Results are zeros.

    An op without a kernel does not run either; its name goes to `in_numpy` of the launcher that will run.
    """

    def __init__(self, launch: Launcher) -> None:
        super().__init__(launch.threads, launch.level)
        self.library, self.in_numpy = launch.library, launch.in_numpy
        self._needed: dict[Kernel, None] = {}
        self._optional: dict[Kernel, None] = {}  # NumPy does without them

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return np.zeros(shape, dtype)

    def __call__(
        self,
        kernel: Kernel[Record],
        units: Units,
        arguments: Record,
        grain: int = 0,
        spare: int = 0,
    ) -> None:
        if self._recording is None:
            self._need(kernel)
        else:
            super().__call__(kernel, units, arguments, grain, spare)

    def _need(self, kernel: Kernel) -> None:
        if kernel not in self._optional:
            self._needed[kernel] = None
            self.library.expect([kernel])

    def has(self, kernel: Kernel) -> bool:
        self._optional[kernel] = None
        return True

    def can_run(self, kernels: Sequence[Kernel]) -> bool:
        """True: what the first requests need is waited for, even if there is another way."""
        return True

    def unrecorded(self, op: Op, name: str) -> Op:
        """A function that notes `name` instead of running `op`.

        It returns zeros like its first argument if that is an array, else None.
        """

        def noted(first: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recording is not None:
                raise CannotRecord
            self.in_numpy.add(name)
            return np.zeros_like(first) if isinstance(first, np.ndarray) else None

        return cast(Op, noted)

    def replay(self, recording: Recording) -> None:
        for launch in recording.launches:
            self._need(launch.kernel)

    def wait(self, progress: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Wait until the kernels are compiled that no op can do without, and compile the others from then on.

        Before, they would take time from what loads the model. See `Library.wait`.
        """
        self.library.wait(self._needed, progress)
        self.library.expect(self._optional)
