"""PolarQuant: every 16 values as one radius and 15 quantized angles.

    (x₂ⱼ, x₂ⱼ₊₁) = r·(cos θ, sin θ), then the same with adjacent radii r, on four levels: 16 values → 1 radius

Source: Han et al., "PolarQuant: Quantizing KV Caches with Polar Transformation", 2025: Definition 1 and Algorithm 1
(the transform and its inverse), Lemma 2 (the densities of the angles), §4.1 (four levels, bits 4/2/2/2, fp16 radius).
Bits per value: (16 + 8·4 + 4·2 + 2·2 + 1·2) / 16 = 3.875. Mean squared error on Gaussian vectors: .0321 per variance.
Decode, per 8 values: 2 lookups of 4 values (a byte of level 1 each) and 1 lookup of 8 factors (all levels above); then,
per value, two multiplications, by the factor and by the radius.

Options: the rotation, `+hadamard` (the default), `+dense` or `+none`.

A head dim that is a multiple of 8 but not of 16 has three levels and a radius for every 8 values: 4.75 bits per value.

**Codes.** Level 1: θ in [0, 2π) is uniform, so sixteen equal arcs are optimal. Code c is the arc [c, c+1)·π/8 and
decodes to its middle, so the signs of x and y select the quadrant. Level ℓ ≥ 2: θ in [0, π/2] has a density
proportional to sin^(2^(ℓ−1)−1)(2θ), and is cut into four halfway between `CENTRES`. So every level splits a quadrant
into four at a threshold τ, at π/4 and at π/2 − τ, and no angle is computed: with squares, θ > τ is b² > tan²(τ)·a². The
sum of both squares is the input of the next level; only the last takes a root. The arithmetic is float32 without fused
multiply-add, so that codes are the same wherever they are computed. Squares of magnitudes under 1e-19 underflow; in
half precision such radii are 0 anyway.

**Streams.** N tokens of one KV head, G = D/16 groups. Of a group's 14 bits above level 1, two are level 4's, and each
half of 8 values has six: `level3 << 4 | second level2 << 2 | first level2`.

    radius  (N, G)    float16  norm of the group, at most 65504
    level1  (N, D/4)  8 bits   pairs 2i (low four bits) and 2i + 1 of the token
    upper8  (N, G)    8 bits   level4 << 6 | six bits of the first half
    upper6  (N, G)    6 bits   six bits of the second half

With three levels, G = D/8, there is no upper8, and upper6 holds the six bits of each group. In a block of four tokens,
a vector (3, −4, 0, …, 0, 12) at token 1:

>>> x = np.zeros((4, 16), np.float32)
>>> x[1, [0, 1, 15]] = 3, -4, 12
>>> codes = create("polarquant", ()).quantize(x[None])
>>> codes["radius"].ravel().tolist()
[0.0, 13.0, 0.0, 0.0]
>>> [f"{code:08b}" for code in codes["level1"][0, 1]]  # pair 0: 306.9° is in arc 13; pair 7: 90° closes arc 3
['00001101', '00000000', '00000000', '00110000']
>>> f"{codes['upper8'][0, 1, 0]:08b}"  # level 4: atan2(12, 5) = 67.4° has code 3; first half: all at 0°
'11000000'
>>> f"{codes['upper6'][0, 1, 0]:06b}"  # the last pair of the second half: 90° has code 3
'111100'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.rotation import PRECONDITIONINGS, preconditioning
from polarlm.engine.codecs.schema.arrays import HALF_MAX, widen
from polarlm.engine.codecs.schema.streams import Schema, codes, join, joined_table, numbers

NAMES = ("polarquant",)

# Level → the decoded angles, radians, symmetric about π/4. For levels 2 to 4, Lloyd's algorithm on the angles' density,
# sin^(2^(level−1) − 1)(2θ) (scripts/lloyd.py of commit 0db755bb).
CENTRES = {
    1: tuple((code + 0.5) * np.pi / 8 for code in range(16)),
    2: (0.309756116982453, 0.6339802399913297, 0.9368160868035673, 1.2610402098124438),
    3: (0.4262496930707171, 0.6743849977574353, 0.8964113290374609, 1.1445466337241796),
    4: (0.5242140911034305, 0.7059094056614765, 0.8648869211334204, 1.0465822356914662),
}
# Level → tan²(τ) of the first threshold τ of a quadrant.
TAN_SQUARED = {level: np.float32(np.tan((first + second) / 2) ** 2) for level, (first, second, *_) in CENTRES.items()}


def level_count(head_dim: int) -> int:
    return 4 if head_dim % 16 == 0 else 3


def _quarter(squares: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray]:
    """squares (..., 2n): a², b² alternating → codes within a quadrant (..., n) uint8, a² + b² (..., n)."""
    a, b = squares[..., 0::2], squares[..., 1::2]
    tan_squared = TAN_SQUARED[level]
    code = (b > tan_squared * a).view(np.uint8)
    code += b > a
    code += tan_squared * b > a
    return code, a + b


@cache
def _level1_table() -> np.ndarray:
    """The four values of each two codes of level 1 at radius 1, (256, 4) float32."""
    return joined_table(np.stack([np.cos(CENTRES[1]), np.sin(CENTRES[1])], -1), 4).astype(np.float32)


@cache
def upper_table(levels: int) -> np.ndarray:
    """The factors of the 8 values of a half, for each of its codes (six bits, and `level4 << 6` if there is a level 4).

    (4 ** levels, 8) float32: the radius of each pair, twice. Level 4 multiplies a first half by the cosine of its angle
    and a second half by the sine, which is the cosine at the complement of the code.
    """
    index = np.arange(4**levels)
    cosine = {level: np.cos(CENTRES[level]) for level in (2, 3, 4)}

    def split(level: int, code: np.ndarray) -> np.ndarray:
        """(..., 2): the two radii that a radius of 1 splits into."""
        return np.stack([cosine[level][code], cosine[level][3 - code]], -1)

    low = np.stack([split(2, index & 3), split(2, index >> 2 & 3)], 1)
    radii = split(3, index >> 4 & 3)[:, :, None] * low
    if levels == 4:
        radii *= cosine[4][index >> 6][:, None, None]
    return np.repeat(radii.reshape(-1, 4), 2, axis=1).astype(np.float32)


@dataclass(frozen=True)
class PolarQuant(Codec):
    name: str = "polarquant"
    preconditioning: str = "hadamard"

    multiples = 8, 4

    def rotation(self, head_dim: int) -> np.ndarray | None:
        return preconditioning(self.preconditioning, head_dim)

    def schema(self, block_size: int, head_dim: int) -> Schema:
        levels = level_count(head_dim)
        groups = block_size, head_dim >> levels
        upper8 = {"upper8": codes(8, *groups)} if levels == 4 else {}
        return {
            "radius": numbers(np.float16, *groups),
            "level1": codes(8, block_size, head_dim // 4),
            **upper8,
            "upper6": codes(6, *groups),
        }

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        *_, block_size, groups = fields["radius"].shape
        return block_size, groups << (4 if "upper8" in fields else 3)

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        (level1, level2, level3, *level4), norms = self.angles(x)
        streams = {"radius": np.minimum(norms, HALF_MAX).astype(np.float16), "level1": join(level1, 4)}
        upper6 = level3 << 4 | level2[..., 1::2] << 2 | level2[..., 0::2]
        if not level4:
            return {**streams, "upper6": upper6}
        return {**streams, "upper8": level4[0] << 6 | upper6[..., 0::2], "upper6": upper6[..., 1::2]}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        levels = level_count(out.shape[-1])
        level1, radius = streams["level1"], np.empty(streams["radius"].shape, np.float32)
        widen(streams["radius"], radius)
        np.take(_level1_table(), level1, axis=0, mode="clip", out=out.reshape(*level1.shape, 4))
        out *= np.take(upper_table(levels), rows_of(streams), axis=0, mode="clip").reshape(out.shape)
        out *= np.repeat(radius, 2**levels).reshape(out.shape)

    def angles(self, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """x (M, N, D) → codes of the angles of every level, uint8, (M, N, D/2) and so on; norms (M, N, D/2^levels),
        which are infinite where a square overflows."""
        with np.errstate(over="ignore"):
            negative = (x < 0).view(np.uint8)
            level1, squares = _quarter(x * x, 1)
            # Negating x moves an angle from arc c to 7 − c, negating y to 15 − c.
            level1 ^= negative[..., 0::2] * np.uint8(7)
            level1 ^= negative[..., 1::2] * np.uint8(15)
            angles = [level1]
            for level in range(2, level_count(x.shape[-1]) + 1):
                code, squares = _quarter(squares, level)
                angles.append(code)
        return angles, np.sqrt(squares)


def rows_of(streams: Mapping[str, np.ndarray]) -> np.ndarray:
    """Streams → the row of `upper_table` for every 8 values, (..., N, D/8) uint8: level 4, if any, and the six bits."""
    if "upper8" not in streams:
        return streams["upper6"]
    first, second = streams["upper8"], streams["upper6"]
    *lead, groups = first.shape
    rows = np.empty((*lead, groups, 2), np.uint8)
    rows[..., 0] = first
    rows[..., 1] = second | ~first & 0xC0  # the sine of level 4 is the cosine at the complement
    return rows.reshape(*lead, 2 * groups)


def from_rows(rows: np.ndarray, levels: int) -> dict[str, np.ndarray]:
    """The streams of the levels above the first; the inverse of `rows_of`."""
    if levels == 3:
        return {"upper6": rows}
    return {"upper8": rows[..., 0::2], "upper6": rows[..., 1::2] & 63}


def create(name: str, options: tuple[str, ...]) -> PolarQuant:
    return PolarQuant("+".join((name, *options)), chosen_preconditioning(name, options))


def chosen_preconditioning(name: str, options: tuple[str, ...]) -> str:
    """The preconditioning in `options`, or the default. Raises ValueError on any other option, or on two."""
    if len(options) > 1 or not set(options) <= set(PRECONDITIONINGS):
        raise ValueError(
            f"Cache type {name} has the options {', '.join(PRECONDITIONINGS)} (at most one), "
            f"as in {name}+{PRECONDITIONINGS[1]}, but {'+'.join(options)!r} was given."
        )
    return (*options, PRECONDITIONINGS[0])[0]
