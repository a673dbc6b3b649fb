"""The compiled kernels of this process."""

from __future__ import annotations

import threading
from functools import cache

from engine.backends.native.compiler import Kernel, LoadedObject, compile_object
from engine.backends.native.target import Level


class Library:
    """Compiles kernels for one level when they are first asked for."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._lock = threading.Lock()
        self._loaded: dict[Kernel, LoadedObject] = {}

    def address(self, kernel: Kernel) -> int:
        """The address of the compiled kernel."""
        loaded = self._loaded.get(kernel)
        if loaded is None:
            with self._lock:
                loaded = self._loaded.get(kernel)
                if loaded is None:
                    loaded = LoadedObject(compile_object(kernel, self.level), self.level)
                    self._loaded[kernel] = loaded
        return loaded.address

    @property
    def names(self) -> list[str]:
        """Names of the kernels that have been asked for."""
        return sorted(kernel.name for kernel in self._loaded)


@cache
def library(level: Level) -> Library:
    """The library of a level; all engines of the process share it."""
    return Library(level)
