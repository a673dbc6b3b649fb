"""Which backend serves a --device."""

from __future__ import annotations

import ctypes.util

from engine.backends.numpy_ops import NumpyOps
from engine.backends.ops import Ops
from engine.errors import EngineError


def select(device: str, threads: int) -> tuple[Ops, str]:
    """The ops of `device` ("auto", "cpu" or "cuda"), and a sentence about the choice, empty where none is needed.

    Raises EngineError for a device that cannot be had.
    """
    if device == "cpu":
        return NumpyOps(threads), ""
    if device == "cuda":
        raise EngineError(
            "--device cuda: this version has no CUDA backend; use --device cpu or leave the flag out",
            "device_unavailable",
        )
    if device != "auto":
        raise EngineError(f"--device {device}: there are auto, cpu and cuda")
    if ctypes.util.find_library("cuda"):
        return NumpyOps(threads), "An NVIDIA driver is here, but this version has no CUDA backend: running on the CPU."
    return NumpyOps(threads), "No NVIDIA driver found: running on the CPU."
