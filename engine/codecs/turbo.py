"""Turbo: one scalar code per value, for the normal distribution of every channel after a random rotation.

    x · diag(±1)·H/√D·diag(±1) = n·y,  n = ‖x‖/√D;  every yᵢ is close to N(0, 1) and takes the nearest of 2^b levels

Source: Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", 2025, Algorithm 1
(least mean squared error: rotate, then one Lloyd–Max quantizer for all coordinates). As in its common implementations,
the rotation is sign flip → Walsh–Hadamard → sign flip instead of a dense matrix, and the levels fit N(0, 1/D).
Levels: Max, "Quantizing for minimum distortion", 1960, by Lloyd's algorithm on the density; scripts/lloyd.py of
commit 0db755bb computes them.
Bits per value: b + 16/D, for `turbo2`, `turbo3` and `turbo4` with b = 2, 3, 4. Mean squared error on Gaussian vectors
of 128 values: .116, .0340, .0093 per variance.
Decode, per value: a quarter of a lookup of four values and one multiplication by the norm.

**Streams.** N tokens of one KV head. A code of a pair has the code of its first value in the low b bits, and of its
second value above; codes of values number the levels upwards.

    norm   (N,)      float16  n, at most 65504 over the largest level, so that no decoded value exceeds half precision
    codes  (N, D/2)  2b bits

>>> codes = create("turbo2", ()).quantize(np.array([[[1, -1, 1, 3, 0, 0, 0, 2]]], np.float32))
>>> codes["norm"].tolist()  # √(16 / 8)
[[1.4140625]]
>>> [f"{code:04b}" for code in codes["codes"][0, 0]]  # thresholds at ±0.98 and 0 times the norm
['0110', '1110', '0101', '1101']
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.parts.pair_codec import PairCodec, PairStore
from polarlm.engine.codecs.parts.rotation import twice_signed_hadamard

NAMES = ("turbo2", "turbo3", "turbo4")

# Bits → the positive half of the levels for N(0, 1), ascending.
LEVELS = {
    2: (0.4527800346366299, 1.5104176084993848),
    3: (0.24509417894464633, 0.7560052812070376, 1.3439092785065845, 2.1519457045385577),
    4: (
        0.12839502985204226,
        0.3880482994929113,
        0.6567591185366196,
        0.9423404564923504,
        1.2562311973534073,
        1.6180463860284946,
        2.06901722653787,
        2.7325895710009083,
    ),
}


@cache
def levels_of(bits: int) -> np.ndarray:
    """All levels, ascending, (2^b,) float32."""
    half = np.array(LEVELS[bits], np.float32)
    return np.concatenate([-half[::-1], half])


@cache
def thresholds_of(bits: int) -> np.ndarray:
    """Thresholds between adjacent levels, (2^b − 1,) float32. A value on a threshold takes the lower level."""
    levels = levels_of(bits)
    return (levels[1:] + levels[:-1]) / 2


class TurboTable(PairStore):
    """The table of `turbo`: values of unit variance are rounded to the nearest level."""

    width = 1

    @property
    def points(self) -> np.ndarray:
        return levels_of(self.code_bits)[:, None]

    def nearest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, 1) float32 → codes (R,) uint8, levels (R, 1) float32."""
        codes = np.zeros(len(x), np.uint8)
        for threshold in thresholds_of(self.code_bits):  # so few vectorized comparisons beat a search
            codes += x[:, 0] > threshold
        return codes, levels_of(self.code_bits)[codes][:, None]


@dataclass(frozen=True)
class Turbo(PairCodec):
    largest = np.float32(np.inf)  # so vectors whose norm overflows get the codes next to 0
    multiples = 8, 1

    def rotation(self, head_dim: int) -> np.ndarray:
        return twice_signed_hadamard(head_dim)


def create(name: str, options: tuple[str, ...]) -> Turbo:
    check_no_options(name, options)
    bits = int(name.removeprefix("turbo"))
    return Turbo(name, TurboTable(2 * bits, half_norms=True, reach=LEVELS[bits][-1]))
