"""Overlapped launches: kernels that start before their predecessor has ended, CUDA's programmatic dependent launch, and
wait for it by themselves, with `wait_for_previous` of `cuda/prelude.cuh`."""

from __future__ import annotations

import os

VARIABLE = "POLARLM_OVERLAP_LAUNCHES"  # 1 turns these launches on, where the GPU and CUDA support them; 0 off

_LEAST_CAPABILITY = 9, 0
# Compute capabilities of GPUs on which `make gpu-test`, which launches in both ways, has passed: last on 2026-11-26,
# and on 2026-11-28 with overlapped launches.
_TESTED = ((9, 0),)
_LEAST_CUDA = 12030  # the first version whose graphs keep these launches


def is_enabled(capability: tuple[int, int]) -> bool:
    """Whether the environment turns these launches on; if it says nothing, whether they are proved on such a GPU."""
    setting = os.environ.get(VARIABLE)
    return capability in _TESTED if not setting else setting == "1"


def is_supported(capability: tuple[int, int], *cuda_versions: int) -> bool:
    """Whether a GPU of this compute capability supports them, with these versions of driver and runtime."""
    return capability >= _LEAST_CAPABILITY and min(cuda_versions) >= _LEAST_CUDA
