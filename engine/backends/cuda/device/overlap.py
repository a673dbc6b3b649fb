"""Overlapped launches: kernels that start before their predecessor has ended, CUDA's programmatic dependent launch.

CuPy has no call for them, so the driver's `cuLaunchKernelEx` is called directly. Such a kernel must itself wait for the
reads and writes of earlier kernels, with `wait_for_previous` of `cuda/prelude.cuh`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

VARIABLE = "POLARLM_OVERLAP_LAUNCHES"  # 1 turns these launches on, where the GPU and CUDA support them; 0 off

_LEAST_CAPABILITY = 9, 0
_PROVED = ((9, 0),)  # compute capabilities of GPUs on which all tests have passed with these launches
_LEAST_CUDA = 12030  # the first version whose graphs keep these launches

_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def is_wanted(capability: tuple[int, int]) -> bool:
    """Whether the environment turns these launches on; if it says nothing, whether they are proved on such a GPU."""
    asked = os.environ.get(VARIABLE)
    return capability in _PROVED if asked is None else asked == "1"


def is_there(capability: tuple[int, int], *cuda_versions: int) -> bool:
    """Whether a GPU of this compute capability supports them, with these versions of driver and runtime."""
    return capability >= _LEAST_CAPABILITY and min(cuda_versions) >= _LEAST_CUDA


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with the one member of its union that is used here."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("is_allowed", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class OverlappedLaunch:
    """Launches kernels on a stream so that they may start before their predecessor has ended."""

    def __init__(self, driver: Any) -> None:
        """driver: the library from `load_driver`."""
        self._launch = driver.cuLaunchKernelEx
        self._attribute = _Attribute(_SERIALIZATION, b"", 1, b"")

    def __call__(
        self,
        function: int,
        stream: int,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[ctypes._SimpleCData[Any]],
        shared: int,
    ) -> int:
        """Launch a kernel and return the driver's status, 0 for success. function, stream: handles; args: arguments."""
        config = _Config(
            (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]),
            (ctypes.c_uint * 3)(*(*block, 1, 1)[:3]),
            shared,
            stream,
            ctypes.pointer(self._attribute),
            1,
        )
        values = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        return int(self._launch(ctypes.byref(config), ctypes.c_void_p(function), values, None))


def load_driver() -> ctypes.CDLL:
    """The library of the NVIDIA driver. Raises OSError."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
