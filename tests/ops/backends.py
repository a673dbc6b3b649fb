"""The backends that the tests of an op run on: NumPy, kernels of each level of this CPU, and a GPU, which is emulated
unless the environment has TESTS_GPU. Then, or without llvmlite, there are no levels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.cuda.emulated import open_device
from tests.cuda.programs import on_gpu


class Backend(NamedTuple):
    """A way to open ops. level: of the CPU's instructions, for compiled kernels."""

    name: str
    open: Callable[..., Any]
    level: Any = None

    def __str__(self) -> str:
        return self.name


NUMPY = Backend("numpy", lambda: NumpyOps(1))
CUDA = Backend("cuda", lambda **options: CudaOps(open_device(**options)))
EVERY_LEVEL: list[Backend] = []
SOME: list[Backend] = []  # up to four levels, the least and the highest among them
MATRICES: list[Backend] = []  # whose prompts attend by products of matrices of bfloat16
if importlib.util.find_spec("llvmlite") is not None and not on_gpu():
    from polarlm.engine.backends.native.graphs import Graphs
    from polarlm.engine.backends.native.launch import KernelOps, Launcher
    from polarlm.engine.backends.native.ops import NativeOps
    from polarlm.engine.jit.compile.target import levels
    from polarlm.engine.jit.isa.x86 import Avx512Vbmi
    from polarlm.engine.jit.lang import Level
    from tests.jit import levels as some
    from tests.jit.emulated_matrices import EmulatedAmx

    def native(level: Level, threads: int = 1) -> NativeOps:
        """The ops with kernels of a level."""
        ops = NativeOps.__new__(NativeOps)  # which would choose a level
        KernelOps.__init__(ops, Launcher(threads, level))
        ops._graphs, ops._heads = Graphs(ops._launch), {}
        return ops

    def _native_backend(level: Level) -> Backend:
        return Backend(level.name, lambda threads=1: native(level, threads), level)

    def _bfloat_backend(level: Level) -> Backend:
        def open(threads: int = 1) -> NativeOps:
            ops = native(level, threads)
            ops._launch.input_bits = "bf16"
            return ops

        return Backend(f"{level.name}-bf16", open, level)

    EVERY_LEVEL, SOME = [*map(_native_backend, levels())], [*map(_native_backend, some.SOME)]
    bfloat = [level for level in levels() if level.matrices is not None]
    if not bfloat and any(type(level) is Avx512Vbmi for level in levels()):
        bfloat.append(EmulatedAmx())
    MATRICES = [_bfloat_backend(level) for level in bfloat]

BEST = EVERY_LEVEL[-1:]  # nothing where no kernel is compiled
BETWEEN = SOME[1:-1]


def backends(*chosen: Backend) -> pytest.MarkDecorator:
    """Runs a test with the ops of each of these backends, of the levels between the least and the highest in a slow
    test. Without any, which is so where no kernel is compiled, the test is skipped."""
    return pytest.mark.parametrize("ops", [_marked((one,)) for one in chosen], ids=str, indirect=True)


def backend_cases(
    names: str, cases: list[tuple[Any, ...]], slow: Iterable[tuple[Any, ...]] = ()
) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`; the first name is `ops`, and each case begins with its backend. Cases of `slow`
    that are not among the others are slow, and so are those of levels between the least and the highest."""
    more = [case for case in slow if case not in cases]
    every = [*map(_marked, cases), *(pytest.param(*case, marks=pytest.mark.slow) for case in more)]
    ids = [f"{backend}-{number}" for number, (backend, *_) in enumerate([*cases, *more])]
    return pytest.mark.parametrize(names.split(), every, indirect=["ops"], ids=ids)


def _marked(case: tuple[Any, ...]) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow if case[0] in BETWEEN else ())
