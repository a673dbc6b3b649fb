"""On a GPU, a process whose context an error has lost ends: another one runs the rest of its tests."""

from __future__ import annotations

import os

from tests.cuda.programs import on_gpu


def pytest_runtest_logfinish() -> None:
    if on_gpu() and "PYTEST_XDIST_WORKER" in os.environ:
        import cupy

        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError:
            os._exit(1)
