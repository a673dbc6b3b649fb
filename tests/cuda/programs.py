"""`Program` for tests of kernels: the emulator's, or a GPU's if the environment has TESTS_GPU."""

from __future__ import annotations

import os
from functools import cache

_ON_GPU = bool(os.environ.get("TESTS_GPU"))

if _ON_GPU:
    from tests.cuda.gpu_program import Program, capability
else:
    from tests.cuda_emulator import Program

    def capability() -> tuple[int, int]:
        raise AssertionError("the emulator has none")


def on_gpu(unless: tuple[int, int] | None = None) -> bool:
    """Whether kernels run on a GPU, of another compute capability than `unless`."""
    return _ON_GPU and (unless is None or capability() != unless)


@cache
def program(text: str) -> Program:
    return Program(text)


__all__ = ["Program", "on_gpu", "program"]
