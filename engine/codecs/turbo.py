"""Turbo: one scalar code per value, for the normal distribution of every channel after a random rotation.

    x · diag(±1)·H/√D·diag(±1) = n·y,  n = ‖x‖/√D;  every yᵢ is close to N(0, 1) and takes the nearest of 2^b levels

Source: Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", 2025, Algorithm 1
(least mean squared error: rotate, then one Lloyd–Max quantizer for all coordinates). As in its common implementations,
the rotation is sign flip → Walsh–Hadamard → sign flip instead of a dense matrix, and the levels are those of N(0, 1/D).
Levels: Max, "Quantizing for minimum distortion", 1960, by Lloyd's algorithm on the density (`scripts/lloyd.py`).
Bits per value: b + 16/D, for `turbo2`, `turbo3` and `turbo4` with b = 2, 3, 4. Mean squared error on Gaussian vectors
of 128 values: .116, .0340, .0093 per variance.
Decode, per value: half a lookup of two values (a quarter of four for `turbo2`) and one multiplication by the norm.

**Bytes.** N tokens of one KV head. Codes number the levels upwards. A word holds the codes of neighbouring channels,
the first in its lowest bits: four of two bits, two of three bits or two of four bits.

    norm   (N,)        float16  n, at most 65504 over the largest level, so that no decoded value exceeds half precision
    codes  (N, D·b/8)  uint8    the D/4 or D/2 words of a token; for b = 3 four words of six bits in three bytes

How four times six bits share three bytes: `_bits.pack_row_of_sixes`: words j, j + D/8, j + D/4 and j + 3D/8 in bytes
j, j + D/8 and j + D/4.

>>> codes = create("turbo2", ()).encode(np.array([[1, -1, 1, 3, 0, 0, 0, 2]], np.float32))
>>> codes["norm"].tolist()  # √(16 / 8)
[1.4140625]
>>> [f"{byte:08b}" for byte in codes["codes"][0]]  # thresholds at ±0.98 and 0 times the norm
['11100110', '11010101']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs import BaseCodec, Field
from polarlm.engine.codecs._arrays import checked, destination, slabs
from polarlm.engine.codecs._bits import pack_row_of_sixes, unpack_row_of_sixes
from polarlm.engine.codecs._checks import check_head_dim, check_no_options
from polarlm.engine.codecs._norms import HalfNorm
from polarlm.engine.codecs._rotation import twice_signed_hadamard

NAMES = ("turbo2", "turbo3", "turbo4")

# Bits → the positive half of the levels for N(0, 1), ascending; `scripts.lloyd.gaussian_levels` derives them.
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
_CODES_PER_WORD = {2: 4, 3: 2, 4: 2}


@cache
def levels_of(bits: int) -> np.ndarray:
    """All levels, ascending, (2^b,) float32."""
    half = np.array(LEVELS[bits], np.float32)
    return np.concatenate([-half[::-1], half])


@cache
def thresholds_of(bits: int) -> np.ndarray:
    """Thresholds between neighbouring levels, (2^b − 1,) float32. A value on a threshold takes the lower level."""
    levels = levels_of(bits)
    return (levels[1:] + levels[:-1]) / 2


@cache
def _table(bits: int) -> np.ndarray:
    """Word → the levels of its codes, (2^(b·codes), codes) float32."""
    count = _CODES_PER_WORD[bits]
    words = np.arange(2 ** (bits * count))[:, None]
    return levels_of(bits)[words >> bits * np.arange(count) & 2**bits - 1]


@dataclass(frozen=True)
class TurboTable:
    """The table of `turbo`: values of unit variance are rounded to the nearest level."""

    bits: int

    width = 1

    @property
    def norms(self) -> HalfNorm:
        return HalfNorm(LEVELS[self.bits][-1])

    def nearest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, 1) float32 → codes (R,) uint8, levels (R, 1) float32."""
        codes = np.zeros(len(x), np.uint8)
        for threshold in thresholds_of(self.bits):  # for so few, vectorised comparisons beat a search
            codes += x[:, 0] > threshold
        return codes, levels_of(self.bits)[codes][:, None]

    def assemble(self, codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        """codes (..., N, D) uint8, norms (..., N) float32 → the fields."""
        count = _CODES_PER_WORD[self.bits]
        words = codes[..., 0::count].copy()
        for place in range(1, count):
            words |= codes[..., place::count] << np.uint8(self.bits * place)
        return {"norm": self.norms.pack(norms), "codes": pack_row_of_sixes(words) if self.bits == 3 else words}


@dataclass(frozen=True)
class Turbo(BaseCodec):
    """Turbo at two, three or four bits."""

    name: str
    bits: int

    @property
    def rounding(self) -> TurboTable:
        return TurboTable(self.bits)

    def check(self, head_dim: int, block_size: int) -> None:
        check_head_dim(self.name, head_dim, 8)

    def rotation(self, head_dim: int) -> np.ndarray:
        return twice_signed_hadamard(head_dim)

    def fields(self, block_size: int, head_dim: int) -> dict[str, Field]:
        return {
            "norm": Field((block_size,), self.rounding.norms.dtype),
            "codes": Field((block_size, head_dim * self.bits // 8), np.dtype(np.uint8)),
        }

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        x = np.ascontiguousarray(checked(x, self.name))
        *lead, block_size, head_dim = x.shape
        self.check(head_dim, block_size)
        rounding, tokens = self.rounding, x.reshape(-1, head_dim)
        codes, norms = np.empty(tokens.shape, np.uint8), np.empty(len(tokens), np.float32)
        for part in slabs(len(tokens), head_dim):
            with np.errstate(over="ignore"):  # an infinite norm gives middle codes, and saturates
                norms[part] = np.sqrt(np.square(tokens[part]).mean(-1))
            unit = tokens[part] / np.where(norms[part] == 0, np.float32(1), norms[part])[:, None]
            codes[part] = rounding.nearest(unit.reshape(-1, 1))[0].reshape(unit.shape)
        return rounding.assemble(codes.reshape(x.shape), norms.reshape(*lead, block_size))

    def decode(self, codes: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        packed, norm = codes["codes"], self.rounding.norms.unpack(codes["norm"])
        head_dim = packed.shape[-1] * 8 // self.bits
        out = destination(out, (*norm.shape, head_dim))
        tokens, words = out.reshape(-1, head_dim), packed.reshape(-1, packed.shape[-1])
        table, norm = _table(self.bits), norm.reshape(-1, 1)
        for part in slabs(len(tokens), head_dim):
            word = unpack_row_of_sixes(words[part]) if self.bits == 3 else words[part]
            np.take(table, word, axis=0, mode="clip", out=tokens[part].reshape(*word.shape, -1))
            tokens[part] *= norm[part]
        return out


def create(name: str, options: tuple[str, ...]) -> Turbo:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return Turbo(name, int(name.removeprefix("turbo")))
