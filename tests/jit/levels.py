"""Kernels at every level of CPU features that this machine can run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from polarlm.engine.jit.compile.compiler import Kernel, Loaded, compile_object, finished, load
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.isa.levels import Level

every_level = pytest.mark.parametrize("level", levels(), ids=lambda level: level.name)

Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_scratch = np.zeros(1 << 20, np.uint8)


@cache
def loaded(kernel: Kernel, level: Level) -> Loaded:
    return load(finished(compile_object(kernel, level)), level)


def run(
    kernel: Kernel,
    level: Level,
    units: int,
    pointers: Sequence[np.ndarray],
    integers: Sequence[int] = (),
    floats: Sequence[float] = (),
) -> None:
    """Run the kernel on all of its units, on the calling thread."""
    arguments = kernel.pack([array.ctypes.data for array in pointers], integers, floats)
    Function(loaded(kernel, level).address)(arguments.ctypes.data, 0, units, _scratch.ctypes.data)
