"""Linear: every rotated value takes the nearest of 256 evenly spaced levels; one norm per vector.

    x = n·y,  n = rms(x);  yᵢ is close to N(0, 1), and takes c/32, c = −128 … 127

Source: uniform quantization of a normal variable: Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory
6(1), 1960. The step is a power of two, so a code times it is exact. It is for the few tokens whose errors cost most.
Bits per value: 8 + 8/D, for `linear8`. Mean squared error on Gaussian vectors of 128 values: .00012 per variance, of
which .00004 is the norm's.
Decode, per value: a conversion to a float, one multiplication by the norm.

**Streams.** N tokens of one KV head. A norm in a byte, with a code for zero: `parts.norms`. A code of a pair has c +
128 of its first value in the low byte, of its second value in the high byte.

    norm   (N,)      uint8
    codes  (N, D/2)  16 bits

>>> codes = create("linear8", ()).quantize(np.array([[[1, -1, 1, 1, 0, 0, 0, 2]]], np.float32))
>>> codes["norm"].tolist()  # √(8 / 8)
[[128]]
>>> codes["codes"].view(np.uint8).tolist()
[[[160, 96, 160, 160, 128, 128, 128, 192]]]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.parts.pair_codec import PairStore, RotatedPairs
from polarlm.engine.codecs.parts.rotation import PRECONDITIONINGS

NAMES = ("linear8",)

BITS = 8  # of a value
STEPS = 32  # to a norm
MIDDLE = 128  # the code of zero


@cache
def levels() -> np.ndarray:
    """The level of each code, (256,) float32, read-only."""
    levels = (np.arange(1 << BITS) - MIDDLE).astype(np.float32) / STEPS
    levels.flags.writeable = False
    return levels


class LinearTable(PairStore):
    """The levels of `linear8`: values of unit variance are rounded to the nearest one."""

    width = 1

    def nearest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, 1) float32 → codes (R,) uint8, levels (R, 1) float32. A value in the middle takes the upper level."""
        codes = np.clip(x[:, 0] * np.float32(STEPS) + np.float32(MIDDLE + 0.5), 0, 255).astype(np.uint8)
        return codes, levels()[codes][:, None]


@dataclass(frozen=True)
class Linear(RotatedPairs):
    takes_metric = False  # errors are small, and a block that is requantized soon is coded fast

    @property
    def points(self) -> np.ndarray:
        return levels()[:, None]

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        bytes_ = streams["codes"].view(np.uint8).reshape(out.shape)
        np.take(levels(), bytes_, out=out, mode="clip")
        out *= self.store.norms.unpack(streams["norm"])[..., None]


def create(name: str, options: tuple[str, ...]) -> Linear:
    check_no_options(name, options)
    return Linear(name, LinearTable(2 * BITS, half_norms=False, reach=4.0), PRECONDITIONINGS[0])
