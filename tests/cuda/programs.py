"""`Program` for tests of kernels: the emulator's, or a GPU's if the environment has POLARLM_TEST_GPU."""

from __future__ import annotations

import os

import pytest

if os.environ.get("POLARLM_TEST_GPU"):
    from tests.cuda.gpu_program import Program, has_wgmma
else:
    from tests.cuda_emulator import Program

    def has_wgmma() -> bool:
        return True


def skip_without_wgmma() -> None:
    """Skips the test where there are no products of warpgroups."""
    if not has_wgmma():
        pytest.skip("needs a GPU of compute capability 9.0")


__all__ = ["Program", "skip_without_wgmma"]
