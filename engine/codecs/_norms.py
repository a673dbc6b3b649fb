"""Norms of vectors as they are stored: in one byte, or in half precision.

A byte holds a logarithm. Code 0 is a norm of zero; code 128 + i and its mirror image 128 − i, for i up to 127, are

    2^±(i/32 + max(i − 88, 0)²/256)

so that norms between 1/6.7 and 6.7, where those of keys and values are, have steps of 1/32 octave and are off by 1.1 %
at most, and the steps widen outwards, to a third of an octave at the ends: 1/960 and 960. A norm takes the code that is
nearest in logarithm; one of less than half the smallest is zero, one beyond the largest is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from engine.codecs._arrays import HALF_MAX, widen


class NormFormat(Protocol):
    """One way to store norms."""

    @property
    def dtype(self) -> np.dtype:
        """Of the stored norms."""

    @property
    def largest(self) -> np.float32:
        """The norm that all beyond it become."""

    def pack(self, norms: np.ndarray) -> np.ndarray:
        """norms (...) float32 ≥ 0, infinite ones too → (...) stored."""

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        """(...) stored → float32."""


@cache
def _table() -> np.ndarray:
    """Code → norm, (256,) float32, ascending."""
    steps = np.arange(1, 256) - 128
    octaves = np.abs(steps) / 32 + np.maximum(np.abs(steps) - 88, 0) ** 2 / 256
    return np.concatenate([[0], np.exp2(np.sign(steps) * octaves)]).astype(np.float32)


@cache
def _thresholds() -> np.ndarray:
    """The norm at which each code but the first begins, (255,) float32."""
    norms = _table()
    return np.concatenate([norms[1:2] / 2, np.sqrt(norms[1:-1] * norms[2:])])


@dataclass(frozen=True)
class ByteNorm:
    """Eight bits."""

    dtype = np.dtype(np.uint8)

    @property
    def thresholds(self) -> np.ndarray:
        """The norm at which each code but the first begins, (255,) float32, ascending."""
        return _thresholds()

    @property
    def largest(self) -> np.float32:
        return np.float32(_table()[-1])

    def pack(self, norms: np.ndarray) -> np.ndarray:
        return np.searchsorted(_thresholds(), norms, side="right").astype(np.uint8)

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        return np.take(_table(), stored)


@dataclass(frozen=True)
class HalfNorm:
    """Sixteen bits. reach: the largest value that a norm is multiplied by; no product leaves half precision."""

    reach: float

    dtype = np.dtype(np.float16)

    @property
    def largest(self) -> np.float32:
        limit = HALF_MAX / np.float32(self.reach)
        half = limit.astype(np.float16)
        return np.float32(half if half <= limit else np.nextafter(half, np.float16(0)))

    def pack(self, norms: np.ndarray) -> np.ndarray:
        return np.minimum(norms, self.largest).astype(np.float16)

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        norms = np.empty(stored.shape, np.float32)
        widen(np.ascontiguousarray(stored), norms)
        return norms
