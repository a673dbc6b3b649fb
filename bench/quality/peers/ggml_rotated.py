"""llama.cpp's q4_0 and q8_0 as its KV cache has them: after a rotation of 64 channels at a time.

Source: llama.cpp, pull request 21038, `llama_kv_cache`: a Hadamard matrix of order 64 without signs, for queries and
keys and for values. Heads of more channels have larger matrices for keys there, and these for values; so the types are
for heads of 64 channels. The codes are of `engine.codecs.ggml`: 4.5 and 8.5 bits.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.codecs.ggml import Q4, Q8
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.parts.rotation import signed_hadamard

NAMES = ("q4_0-rotated", "q8_0-rotated")

_CHANNELS = 64


def hadamard(order: int) -> np.ndarray:
    """The orthogonal Hadamard matrix of a power of two, (order, order) float32: without signs its first column is
    positive."""
    signed = signed_hadamard(order)
    return np.ascontiguousarray(signed * np.sign(signed[:, :1]))


class _Rotated:
    name: str

    def check(self, head_dim: int, block_size: int) -> None:
        if head_dim != _CHANNELS:
            raise ValueError(f"Cache type {self.name} is for heads of {_CHANNELS} channels, and these have {head_dim}.")

    def rotation(self, head_dim: int) -> np.ndarray:
        return hadamard(head_dim)


class RotatedQ4(_Rotated, Q4):
    """q4_0 of rotated vectors."""


class RotatedQ8(_Rotated, Q8):
    """q8_0 of rotated vectors."""


def create(name: str, options: tuple[str, ...]) -> RotatedQ4 | RotatedQ8:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return RotatedQ4(name) if name.startswith("q4") else RotatedQ8(name)
