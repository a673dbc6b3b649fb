"""Kernels at every level of CPU features that this machine can run."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.jit.compile import compiler
from polarlm.engine.jit.compile.compiler import LoadedCode, cacheable_code, compile_object, load
from polarlm.engine.jit.compile.target import levels
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.lang import I8, I16, I32, Emitter, Int64, Kernel, Level, Pointer, Value, vector
from tests.compiled import keeping
from tests.pairs import in_turn

# Up to four levels of this machine, the least and the highest among them, for tests that are not slow.
SOME = [levels()[place] for place in sorted({round(i * (len(levels()) - 1) / 3) for i in range(4)})]
some_levels = in_turn("level", SOME)
every_level = in_turn("level", levels())
# The levels of x86-64 that have instructions of their own: any machine compiles for them. The levels of AArch64 have
# tests in `tests/backends/native/test_arm_loops.py`.
special_levels = in_turn("level", [level for level in LEVELS if level.machine == "x86_64"])

Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_scratch = np.zeros(1 << 20, np.uint8)


def assembly(kernel: Kernel[Any], level: Level) -> str:
    """The machine code of a kernel as text."""
    return _assembly(compiler.source(kernel, level), level).decode()


@keeping
def _assembly(text: str, level: Level) -> bytes:
    target = compiler._target_machine(level)
    return target.emit_assembly(compiler._optimize(text, target)).encode()


class Narrow(Level):
    """A level that no file has: registers of 4 numbers, but 32 of them, and dot products of its own."""

    name = "narrow"
    registers = 32
    code_tiles = ((4, 1),)
    float_tile = 4, 2

    def __init__(self) -> None:
        self.dots = 0  # that have been emitted

    def dot4(self, e: Emitter, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        self.dots += 1
        bytes_ = vector(I8, 4 * total.lanes)
        products = unsigned.bits(bytes_).zext(I16).zext(I32) * signed.bits(bytes_).sext(I16).sext(I32)
        for place in range(4):
            total = total + e.shuffle(products, products, range(place, products.lanes, 4))
        return total


@cache
def loaded(kernel: Kernel, level: Level) -> LoadedCode:
    return load(cacheable_code(compile_object(kernel, level)), level)


@cache
def declared(pointers: str = "", integers: str = "") -> Any:
    pairs = [(name, kind) for names, kind in ((pointers, Pointer), (integers, Int64)) for name in names.split()]
    return NamedTuple("Arguments", pairs)


def run(kernel: Kernel, level: Level, units: int, arguments: tuple[Any, ...]) -> None:
    """Run the kernel on all of its units, on the calling thread. arguments: the kernel's, or their fields."""
    packed = kernel.pack(kernel.arguments(*arguments))
    Function(loaded(kernel, level).address)(packed.ctypes.data, 0, units, _scratch.ctypes.data)
