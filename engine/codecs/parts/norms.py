"""Formats of stored norms: one byte, or half precision.

A byte holds a logarithm. Code 0 is a norm of zero. Codes 128 + i and 128 − i, for i up to 127, are the norms

    2^±(i/32 + max(i − 88, 0)²/256)

so that norms between 1/6.7 and 6.7, the range of keys and values, have steps of 1/32 octave and an error of at most
1.1 %. The steps widen outwards, to a third of an octave at the ends, 1/960 and 960. A norm is rounded to the nearest in
logarithm; norms below half the smallest become zero, and larger norms saturate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs.schema.arrays import HALF_MAX, widen


@cache
def _table() -> np.ndarray:
    """Code → norm, (256,) float32, ascending."""
    steps = np.arange(1, 256) - 128
    octaves = np.abs(steps) / 32 + np.maximum(np.abs(steps) - 88, 0) ** 2 / 256
    return np.concatenate([[0], np.exp2(np.sign(steps) * octaves)]).astype(np.float32)


@cache
def _thresholds() -> np.ndarray:
    """The least norm of each code but the first, (255,) float32, ascending."""
    norms = _table()
    return np.concatenate([norms[1:2] / 2, np.sqrt(norms[1:-1] * norms[2:])])


@dataclass(frozen=True)
class ByteNorm:
    """A norm in eight bits. Both formats pack norms (...) float32 ≥ 0, infinity included, and unpack to float32."""

    dtype = np.dtype(np.uint8)

    @property
    def thresholds(self) -> np.ndarray:
        """The least norm of each code but the first, (255,) float32, ascending."""
        return _thresholds()

    @property
    def largest(self) -> np.float32:
        return np.float32(_table()[-1])

    def pack(self, norms: np.ndarray) -> np.ndarray:
        return np.searchsorted(_thresholds(), norms, side="right").astype(np.uint8)

    def cover(self, norms: np.ndarray) -> np.ndarray:
        """The least norm that can be stored and is not below each of `norms` (...), or else the largest; float32."""
        return self.unpack(np.searchsorted(_table()[:-1], norms, side="left"))

    def unpack(self, stored: np.ndarray) -> np.ndarray:
        return np.take(_table(), stored)


@dataclass(frozen=True)
class HalfNorm:
    """A norm in half precision. reach: the largest factor of a norm; norms saturate so that no product overflows."""

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
