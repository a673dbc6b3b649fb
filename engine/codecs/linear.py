"""Linear: every rotated value takes the nearest of 255 evenly spaced levels; one norm per vector.

    x = n·y,  n ≥ max |xᵢ| · 32/127;  yᵢ takes c/32, c = −127 … 127

The norm is the least one that can be stored and leaves no value beyond the levels, and values are divided by it as it
is stored. So it costs no error of its own, and the levels reach as far as the vector does. The step is a power of two,
so a code times it is exact. It is for the few tokens whose errors cost most.
Source: quantization by the largest value: Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at
Scale", NeurIPS 2022, Section 2.1.
Bits per value: 8 + 8/D, for `linear8`. Mean squared error on Gaussian vectors of 128 values: .000043 per variance.
Decode, per value: a conversion to a float, one multiplication by the norm.

**Streams.** N tokens of one KV head. A norm in a byte, with a code for zero: `parts.norms`. A code of a pair has c +
128 of its first value in the low byte, of its second value in the high byte.

    norm   (N,)      uint8
    codes  (N, D/2)  16 bits

>>> codes = create("linear8", ()).quantize(np.array([[[1, -1, 1, 1, 0, 0, 0, 2]]], np.float32))
>>> codes["norm"].tolist()  # 2^(−31/32), which is 2 · 32/127 or more
[[97]]
>>> codes["codes"].view(np.uint8).tolist()
[[[191, 65, 191, 191, 128, 128, 128, 253]]]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.parts.norms import ByteNorm
from polarlm.engine.codecs.parts.pair_codec import PairStore, RotatedPairs
from polarlm.engine.codecs.parts.rotation import PRECONDITIONINGS

NAMES = ("linear8",)

BITS = 8  # of a value
STEPS = 32  # to a norm
MIDDLE = 128  # the code of zero
REACH = np.float32(STEPS / (MIDDLE - 1))  # the norm of a vector whose largest value is 1


@cache
def levels() -> np.ndarray:
    """The level of each code, (256,) float32, read-only."""
    levels = (np.arange(1 << BITS) - MIDDLE).astype(np.float32) / STEPS
    levels.flags.writeable = False
    return levels


class LinearTable(PairStore):
    """The levels of `linear8`: values of unit variance are rounded to the nearest one."""

    width = 1

    @property
    def points(self) -> np.ndarray:
        return levels()[:, None]

    def nearest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, 1) float32 → codes (R,) uint8, levels (R, 1) float32. A value in the middle takes the upper level."""
        codes = np.clip(x[:, 0] * np.float32(STEPS) + np.float32(MIDDLE + 0.5), 0, 255).astype(np.uint8)
        return codes, levels()[codes][:, None]


@dataclass(frozen=True)
class LinearCodec(RotatedPairs):
    takes_metric = False  # errors are small

    def norms(self, x: np.ndarray) -> np.ndarray:
        norms = self.store.norms
        assert isinstance(norms, ByteNorm)
        return norms.cover(np.abs(x).max(-1) * REACH)

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        bytes_ = streams["codes"].view(np.uint8).reshape(out.shape)
        np.take(levels(), bytes_, out=out, mode="clip")
        out *= self.store.norms.unpack(streams["norm"])[..., None]


def create(name: str, options: tuple[str, ...]) -> LinearCodec:
    check_no_options(name, options)
    return LinearCodec(name, LinearTable(2 * BITS, half_norms=False, reach=4.0), PRECONDITIONINGS[0])
