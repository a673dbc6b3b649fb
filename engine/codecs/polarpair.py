"""PolarQuant of RoPE pairs, keys only: channels j and j + D/2, which RoPE rotates together, as a radius and an angle.

    (kⱼ, kⱼ₊ᴅ/₂) = r·(cos θ, sin θ);  θ ≈ π·code/2^(m−1) − π,  r ≈ code·s,  s = max r / (2^n − 1) of a group of tokens

Source: Wu et al., "PolarQuant: Leveraging Polar Transformation for Efficient Key Cache Quantization and Decoding
Acceleration", 2025, §3.2. Its formula for decoding omits the −π that matches the +π of its angles and would negate
every key; it is added here. The rotation is a permutation that moves channels j and j + D/2 to 2j and 2j + 1. It mixes
no channels, since the codec needs the pairs of RoPE.
Bits per value, n + m = 8 (`polarpair-m4n4`) or 6 (`polarpair-m4n2`) and groups of G tokens: (n + m)/2 + 16/(2G). The
source has one group for the whole text, and also counts its full-precision residual, here the current block.
Decode, per value: one lookup of a cosine or a sine, one product with the radius, and half a product for the radius.

Options: `+g32`, or another number that divides the block size: groups of 32 tokens. The default group is the block.
`+minmax-radius`: codes count from the smallest radius of the group, r ≈ (code + ½)·s + min r with
s = (max r − min r)/2^n, for 16/(2G) bits more. `+minmax`: angles as well, θ ≈ (code + ½)·s + min θ with θ in [0, 2π),
as in the authors' implementation, for 48/(2G) bits more than the paper's. This is better for pairs that rotate little
within a group, and worse if their angles are on both sides of 0, where the range becomes the whole circle.

**Streams.** N tokens of one KV head in N/G groups. Code of pair j, stored channels 2j and 2j + 1: radius << 4 | angle.

    codes        (N, D/2)    8 or 6 bits
    radius_step  (N/G, D/2)  float16  s
    radius_low   (N/G, D/2)  float16  min r, with either option
    angle_step, angle_low    float16  the same for angles, with `+minmax`

Steps and minima are rounded before codes are chosen. Radii beyond 65376 saturate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.schema.arrays import SATURATION
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("polarpair-m4n4", "polarpair-m4n2")

_ANGLES = 16  # m = 4
_DIRECTIONS = np.pi / 8 * np.arange(_ANGLES) - np.pi
COSINES, SINES = np.cos(_DIRECTIONS).astype(np.float32), np.sin(_DIRECTIONS).astype(np.float32)
# Tangents of the upper bounds of the first two directions of a quadrant.
TANGENTS = np.tan(np.pi / 16 * np.array([1, 3])).astype(np.float32)


@dataclass(frozen=True)
class PolarPair(Codec):
    """PolarQuant of RoPE pairs. group: tokens that share scales, None for all of a block. minmax: "radius" or "both"
    (radius and angle) if codes count from the minimum of the group, else ""."""

    name: str
    radius_bits: int
    group: int | None = None
    minmax: str = ""

    serves = frozenset({"k"})

    @property
    def multiples(self) -> tuple[int, int]:
        return 8, self.group or 1

    def rotation(self, head_dim: int) -> np.ndarray:
        return _pair_permutation(head_dim)

    @property
    def bits(self) -> int:
        """Bits per pair code."""
        return 4 + self.radius_bits

    def schema(self, block_size: int, head_dim: int) -> Schema:
        per_group = numbers(np.float16, block_size // (self.group or block_size), head_dim // 2)
        return {"codes": codes(self.bits, block_size, head_dim // 2), **dict.fromkeys(self.scales, per_group)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        *lead, _, pairs = fields["radius_step"].shape
        return 8 * math.prod(fields["codes"].shape[len(lead) :]) // (pairs * self.bits), 2 * pairs

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        blocks, block_size, head_dim = x.shape
        group = self.group or block_size
        x = x.reshape(blocks, block_size // group, group, head_dim)
        a, b = x[..., 0::2], x[..., 1::2]
        with np.errstate(over="ignore"):
            radius = np.minimum(np.hypot(a, b), SATURATION)
        if self.minmax:
            radius_code, scales = _quantize_from_minimum(radius, 2**self.radius_bits, "radius")
        else:
            radius_code, scales = _quantize_from_zero(radius, 2**self.radius_bits - 1)
        if self.minmax == "both":
            angle = np.arctan2(b, a)
            angle_code, more = _quantize_from_minimum(
                np.where(angle < 0, angle + np.float32(2 * np.pi), angle), _ANGLES, "angle"
            )
            scales |= more
        else:
            angle_code = _direction(a, b)
        return {"codes": (radius_code << 4 | angle_code).reshape(blocks, block_size, head_dim // 2), **scales}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        blocks, groups, half = streams["radius_step"].shape
        pairs = streams["codes"].reshape(blocks, groups, -1, half)
        radius = (pairs >> 4).astype(np.float32)
        if self.minmax:
            radius += np.float32(0.5)
        radius *= _per_token(streams["radius_step"])
        if self.minmax:
            radius += _per_token(streams["radius_low"])
        if self.minmax == "both":
            step, low = (_per_token(streams[name]) for name in ("angle_step", "angle_low"))
            angle = ((pairs & 15) + np.float32(0.5)) * step + low
            cosine, sine = np.cos(angle), np.sin(angle)
        else:
            cosine, sine = COSINES[pairs & 15], SINES[pairs & 15]
        values = out.reshape(*pairs.shape, 2)
        np.multiply(cosine, radius, out=values[..., 0])
        np.multiply(sine, radius, out=values[..., 1])

    @property
    def scales(self) -> tuple[str, ...]:
        radius, angle = ("radius_step", "radius_low"), ("angle_step", "angle_low")
        return {"": radius[:1], "radius": radius, "both": radius + angle}[self.minmax]


@cache
def _pair_permutation(head_dim: int) -> np.ndarray:
    """The permutation (D, D) float32, read-only, that moves channels j and j + D/2 to 2j and 2j + 1."""
    order = np.arange(head_dim).reshape(2, -1).T.ravel()
    matrix = np.eye(head_dim, dtype=np.float32)[:, order]
    matrix.flags.writeable = False
    return matrix


def _per_token(scale: np.ndarray) -> np.ndarray:
    """(..., N/G, D/2) float16 → (..., N/G, 1, D/2) float32."""
    return scale[..., None, :].astype(np.float32)


def _divisor(step: np.ndarray) -> np.ndarray:
    """A stored step (..., N/G, D/2), with 1 instead of 0 → a divisor (..., N/G, 1, D/2) float32."""
    return _per_token(np.where(step == 0, np.float16(1), step))


def _quantize_from_zero(radius: np.ndarray, last: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """radius (..., N/G, G, D/2) → codes 0 … last, uint8, and the stream of steps."""
    step = (radius.max(-2) / np.float32(last)).astype(np.float16)
    return np.minimum(np.rint(radius / _divisor(step)), last).astype(np.uint8), {"radius_step": step}


def _quantize_from_minimum(x: np.ndarray, count: int, name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """x (..., N/G, G, D/2) ≥ 0 → codes 0 … count − 1, uint8, of equal cells from minimum to maximum; streams of steps
    and minima."""
    smallest = x.min(-2)
    low, step = smallest.astype(np.float16), ((x.max(-2) - smallest) / np.float32(count)).astype(np.float16)
    codes = np.clip(np.floor((x - _per_token(low)) / _divisor(step)), 0, count - 1).astype(np.uint8)
    return codes, {f"{name}_step": step, f"{name}_low": low}


def _direction(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Codes of the nearest of the sixteen directions, uint8, found by comparisons in a quadrant without an angle."""
    first, second = TANGENTS
    x, y = np.abs(a), np.abs(b)
    code = (y > first * x).view(np.uint8)
    for is_beyond in (y > second * x, second * y > x, first * y > x):
        code += is_beyond
    code = np.where(a < 0, 8 - code, code)
    return (np.where(b < 0, 16 - code, code) + np.uint8(8)) & np.uint8(15)


def create(name: str, options: tuple[str, ...]) -> PolarPair:
    minmax_modes = {"minmax-radius": "radius", "minmax": "both"}
    minmax = [option for option in options if option in minmax_modes]
    groups = [option for option in options if option[:1] == "g" and option[1:].isdecimal() and int(option[1:]) > 0]
    if len(minmax) + len(groups) < len(options) or len(minmax) > 1 or len(groups) > 1:
        raise ValueError(
            f"Cache type {name} has the options minmax or minmax-radius, and g with a number of tokens, "
            f"as in {name}+g32+minmax: {'+'.join(options)!r} is not one of these."
        )
    return PolarPair(
        "+".join((name, *options)),
        int(name[-1]),
        int(groups[0][1:]) if groups else None,
        minmax_modes[minmax[0]] if minmax else "",
    )
