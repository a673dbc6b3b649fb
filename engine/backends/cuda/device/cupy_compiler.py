"""Compiled modules of CUDA texts, and their kernels."""

from __future__ import annotations

import cupy

from polarlm.engine.backends.cuda.device.kernel_source import OPTIONS


def compile_module(text: str) -> cupy.RawModule:
    """The module of a text for the current GPU. NVRTC releases Python's lock. Raises its errors."""
    module = cupy.RawModule(code=text, options=OPTIONS)
    module.compile()
    return module


class Kernel:
    """A compiled kernel; whether it waits for its predecessor by itself; and its limit of dynamic shared memory."""

    def __init__(self, function: cupy.RawKernel, waits: bool):
        self.function, self.waits = function, waits
        self._allowed = 0  # CUDA's own limit depends on the kernel's static shared memory, so it is always raised

    def allow(self, shared: int) -> None:
        if shared > self._allowed:
            self.function.max_dynamic_shared_size_bytes = shared
            self._allowed = shared
