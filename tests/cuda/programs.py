"""`Program` for tests of kernels: the emulator's, or a GPU's if the environment has POLARLM_TEST_GPU."""

from __future__ import annotations

import os

if os.environ.get("POLARLM_TEST_GPU"):
    from tests.cuda.gpu_program import Program
else:
    from tests.cuda_emulator import Program

__all__ = ["Program"]
