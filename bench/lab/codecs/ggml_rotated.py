"""llama.cpp's q4_0 and q8_0 as its KV cache has them: after a rotation by Hadamard matrices without signs.

Source: llama.cpp, pull request 21038, `llama_kv_cache`. Queries and keys have the largest matrices that divide the
channels of a head, values matrices of order 64: `q4_0-rotated/q4_0-rotated-v`. With heads of 64 channels, both are
`q4_0-rotated`. The codes are of `bench.quality.codecs.ggml`: 4.5 and 8.5 bits.
"""

from __future__ import annotations

import numpy as np

from polarlm.bench.quality.codecs.ggml import Q4, Q8
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.parts.rotation import signed_hadamard

NAMES = ("q4_0-rotated", "q4_0-rotated-v", "q8_0-rotated", "q8_0-rotated-v")

_CHANNELS = 64


def hadamard(order: int) -> np.ndarray:
    """The orthogonal Hadamard matrix of a power of two, (order, order) float32: without signs its first column is
    positive."""
    signed = signed_hadamard(order)
    return np.ascontiguousarray(signed * np.sign(signed[:, :1]))


class _Rotated:
    name: str
    multiples = _CHANNELS, 1

    def rotation(self, head_dim: int) -> np.ndarray:
        order = _CHANNELS if self.name.endswith("-v") else head_dim & -head_dim
        return np.kron(np.eye(head_dim // order, dtype=np.float32), hadamard(order))


class RotatedQ4(_Rotated, Q4):
    """q4_0 of rotated vectors."""


class RotatedQ8(_Rotated, Q8):
    """q8_0 of rotated vectors."""


def create(name: str, options: tuple[str, ...]) -> RotatedQ4 | RotatedQ8:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return RotatedQ4(name) if name.startswith("q4") else RotatedQ8(name)
