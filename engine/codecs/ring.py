"""Ring: every pair of rotated channels becomes one of 32 to 1,024 points on circles; one norm per vector.

    x = n·y,  n = rms(x);  (y₂ⱼ, y₂ⱼ₊₁) is close to a circular Gaussian pair, and takes the nearest of 2^m points

Source: unrestricted polar quantization, with more phases on larger circles: Wilson, "Magnitude/phase quantization of
independent Gaussian variates", IEEE Trans. Commun. 28(11), 1980; Swaszek & Thomas, "Optimal circularly symmetric
quantizers", J. Franklin Inst. 313(6), 1982. Our own: these designs, an exact search among all points, and the use for a
KV cache.
Bits per value: m/2 + 8/D for `ring2.5`, `ring3`, `ring3.5`, `ring4` and `ring5` with m = 5, 6, 7, 8, 10, and m/2 +
16/D with the option `norm16`. Mean squared error on Gaussian vectors of 128 values: .0572, .0292, .0151, .0077, .0020
per variance.
Decode, per value: a quarter of a lookup of four values (`ring5`: half a lookup of two), one multiplication by the norm.

**Codes.** Points are numbered ring by ring from the inside, and counter-clockwise on each ring. Odd rings (the
innermost is ring 0) are rotated by half a phase. scripts/design_rings.py of commit edc1a714 found the phases; the radii
follow from them by Lloyd's algorithm. The nearest point is the first with the least |p|²/2 − y·p in float32: see
`parts.nearest`.

All rings of `ring5` are rotated, and have a multiple of four phases, which costs 0.5 % in the error. Its points are
then mirror images of those in a quadrant: the low eight bits of a code are the number of a point whose coordinates are
positive, bit 8 negates the first one, and bit 9 the second one. So kernels need a table of 256 points alone.

**Streams.** N tokens of one KV head. A norm in a byte, with a code for zero: `parts.norms`.

    norm   (N,)      uint8, or with `norm16` float16
    codes  (N, D/2)  m bits

>>> x = np.array([[2, 0, 0, 2, 0, 0, 0, 0]] * 4, np.float32)
>>> codes = create("ring4", ("norm16",)).encode(x)
>>> codes["norm"].tolist()  # √(8 / 8)
[1.0, 1.0, 1.0, 1.0]
>>> points = points_of(8)
>>> [bool(np.hypot(*(points[code] - pair)) < 0.2) for code, pair in zip(codes["codes"][0], x[0].reshape(-1, 2))]
[True, True, True, True]
"""

from __future__ import annotations

from functools import cache

import numpy as np

from polarlm.engine.codecs.parts.pair_codec import PairStore, RotatedPairs, parse_options

NAMES = ("ring2.5", "ring3", "ring3.5", "ring4", "ring5")

# Bits per pair → (phases, radius) of each ring.
RINGS: dict[int, tuple[tuple[int, float], ...]] = {
    5: ((2, 0.2297), (8, 0.8013), (11, 1.4678), (11, 2.3123)),
    6: ((1, 0.0), (6, 0.4604), (12, 0.892), (15, 1.3725), (15, 1.9139), (15, 2.6469)),
    7: ((1, 0.0), (8, 0.3773), (13, 0.6947), (18, 1.0251), (23, 1.3894), (23, 1.7962), (23, 2.2838), (19, 2.9727)),
    8: (
        (1, 0.0),
        (6, 0.2277),
        (11, 0.4301),
        (17, 0.6458),
        (22, 0.8729),
        (29, 1.116),
        (29, 1.3704),
        (31, 1.6431),
        (31, 1.9437),
        (31, 2.2949),
        (28, 2.7427),
        (20, 3.3708),
    ),
    10: (
        (4, 0.0807),
        (12, 0.1951),
        (16, 0.307),
        (24, 0.4195),
        (28, 0.5332),
        (36, 0.649),
        (40, 0.7671),
        (44, 0.8861),
        (52, 1.0096),
        (56, 1.1384),
        (60, 1.2717),
        (64, 1.4108),
        (60, 1.554),
        (64, 1.7026),
        (68, 1.8631),
        (72, 2.0396),
        (68, 2.2336),
        (64, 2.4468),
        (60, 2.6893),
        (56, 2.981),
        (44, 3.3536),
        (32, 3.892),
    ),
}


def in_quadrants(bits: int) -> bool:
    """Whether the points are images of those in a quadrant."""
    return bits == 10


@cache
def points_of(bits: int) -> np.ndarray:
    """The point of each code, (2^bits, 2) float32, read-only."""
    rings, symmetric = [], in_quadrants(bits)
    for number, (phases, radius) in enumerate(RINGS[bits]):
        rotation = 0.5 if symmetric else number % 2 / 2
        angle = (np.arange(phases // 4 if symmetric else phases) + rotation) * (2 * np.pi / phases)
        rings.append(radius * np.stack([np.cos(angle), np.sin(angle)], -1))
    points = np.concatenate(rings).astype(np.float32)
    if symmetric:
        points = np.concatenate([points * np.array([x, y], np.float32) for y in (1, -1) for x in (1, -1)])
    points.flags.writeable = False
    return points


class RingTable(PairStore):
    @property
    def points(self) -> np.ndarray:
        return points_of(self.bits)


def create(name: str, options: tuple[str, ...]) -> RotatedPairs:
    preconditioning, half_norms = parse_options(name, options)
    bits = round(2 * float(name.removeprefix("ring")))
    return RotatedPairs("+".join((name, *options)), RingTable(bits, half_norms, RINGS[bits][-1][1]), preconditioning)
