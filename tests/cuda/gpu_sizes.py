"""How much the tests of whole models do: on a GPU a lot, on the emulator what shows that they work."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class GpuSizes:
    """schedules: random schedules of requests, in all tests of them together. prompt, steps: tokens of a prompt, and
    steps after it, in blocks of 16; by default the table of blocks becomes twice as wide.
    long: tokens of a long context. large_blocks: complete blocks of the sequences of a large model."""

    schedules: int = 100
    prompt: int = 261
    steps: int = 130
    long: int = 32768
    large_blocks: tuple[int, ...] = (500, 3, 40, 3, 9)


SMALL = GpuSizes(schedules=1, prompt=29, steps=5, long=1280, large_blocks=(5, 2))
SIZES = GpuSizes() if os.environ.get("TESTS_GPU") else SMALL

# Beside the matrices of a test: the context of its process, kernels, and what earlier tests have left in the pool.
_BESIDE = 1 << 30


def needs(nbytes: int, free: int) -> None:
    """Skip the calling test, saying why, unless `nbytes` and what a test always takes fit into so many free bytes."""
    if nbytes + _BESIDE > free:
        wanted, there = ((size / 2**30) for size in (nbytes + _BESIDE, free))
        pytest.skip(f"needs {wanted:.1f} GiB of the GPU's memory, and {there:.1f} GiB are free")
