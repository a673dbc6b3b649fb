"""OCTOPUS: triplets of channels after a rotation, each a norm and a direction, which is a point of a square.

    x · diag(±1)·H/√D = g·u,  g = ‖x‖;    three channels of u are ρ·n,  ‖n‖ = 1,  p = n/‖n‖₁ on an octahedron
    (ξ, η) = (p₁, p₂) if p₃ ≥ 0, else (±(1 − |p₂|), ±(1 − |p₁|)) with the signs of p₁ and p₂

ξ and η have b + 1 bits each, ρ has b − 1, of Lloyd–Max levels for their densities: ρ² is Beta(3/2, (D − 3)/2), and a
uniform direction has (ξ, η) with a density of ‖n‖₁³. Of the nine directions next to the nearest ξ and η, that with the
largest product s with the triplet is taken, and the level of ρ that is nearest to s. The last triplet of a head is
filled up with zeros: 64 channels have 22. g is a float32.

Source: Boss et al., "OCTOPUS", arXiv 2605.21226, by what notes on the paper and code after it say (katopz/katgpt-rs,
`.research/63_OCTOPUS_…`, `src/octopus`); we found no code of its authors. It speaks of keys. Our reading: values are
coded likewise, and all heads have one rotation. An option of one bit more for products, QJL, is left out.
Bits per value: ⌈D/3⌉·(3b + 1)/D + 32/D, which is 2.906, 3.938 and 4.969 for b = 2, 3, 4 and D = 64. Mean squared error
on Gaussian vectors of 128 values: .083, .0243, .0067 per variance. With ξ, η and ρ each rounded alone it is .0893 for
b = 2 and .0071 for b = 4, where the paper has .0897 and .0071.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.parts.rotation import signed_hadamard
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("octopus2", "octopus3", "octopus4")

_NEXT = np.array(list(product((-1, 0, 1), repeat=2)))


@dataclass(frozen=True)
class Octopus(Codec):
    """`bits`: b. A code has ξ in its low b + 1 bits and ρ above; another one has η."""

    name: str
    bits: int

    def check(self, head_dim: int, block_size: int) -> None:
        if head_dim & (head_dim - 1) or head_dim < 8:
            raise ValueError(f"Cache type {self.name} is for heads of a power of two, and these have {head_dim}.")

    def rotation(self, head_dim: int) -> np.ndarray:
        return signed_hadamard(head_dim)

    def schema(self, block_size: int, head_dim: int) -> Schema:
        triplets = block_size, -(-head_dim // 3)
        first, second = codes(2 * self.bits, *triplets), codes(self.bits + 1, *triplets)
        return {"norm": numbers(np.float32, block_size), "first": first, "second": second}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        block_size = fields["norm"].shape[-1]
        triplets = 8 * fields["second"].shape[-1] // ((self.bits + 1) * block_size)
        return block_size, 1 << (3 * triplets).bit_length() - 1

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        head_dim = x.shape[-1]
        square, radius = levels_of_square(self.bits + 1), levels_of_radius(self.bits - 1, head_dim)
        norm = np.sqrt(np.square(x, dtype=np.float64).sum(-1, keepdims=True))
        unit = np.pad(x / np.where(norm > 0, norm, 1), [*[(0, 0)] * (x.ndim - 1), (0, -head_dim % 3)])
        triplet = unit.reshape(*x.shape[:-1], -1, 3)
        start = nearest(unfolded(triplet), square)
        near = np.clip(start[..., None, :] + _NEXT, 0, len(square) - 1)  # (…, triplets, 9, 2)
        along = (folded(square[near]) * triplet[..., None, :]).sum(-1)
        best = along.argmax(-1)[..., None]
        chosen = np.take_along_axis(near, best[..., None], -2)[..., 0, :]
        rho = nearest(np.take_along_axis(along, best, -1)[..., 0], radius)
        first = chosen[..., 0] | rho << (self.bits + 1)
        return {"norm": norm[..., 0], "first": first.astype(np.uint8), "second": chosen[..., 1].astype(np.uint8)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        head_dim, low = out.shape[-1], self.bits + 1
        square, radius = levels_of_square(low), levels_of_radius(self.bits - 1, head_dim)
        first, second = streams["first"], streams["second"]
        directions = folded(np.stack([square[first & ((1 << low) - 1)], square[second]], -1))
        unit = (radius[first >> low][..., None] * directions).reshape(*out.shape[:-1], -1)
        np.multiply(unit[..., :head_dim], streams["norm"][..., None], out=out, casting="same_kind")


def unfolded(n: np.ndarray) -> np.ndarray:
    """Directions (…, 3) of any length → points of the square from −1 to 1, (…, 2); zeros are its middle."""
    size = np.abs(n).sum(-1, keepdims=True)
    flat = n[..., :2] / np.where(size > 0, size, 1)
    return np.where(n[..., 2:] >= 0, flat, np.copysign(1 - np.abs(flat[..., ::-1]), flat))


def folded(point: np.ndarray) -> np.ndarray:
    """The inverse of `unfolded`: unit vectors."""
    up = 1 - np.abs(point).sum(-1, keepdims=True)
    flat = np.where(up >= 0, point, np.copysign(1 - np.abs(point[..., ::-1]), point))
    n = np.concatenate([flat, up], -1)
    return n / np.sqrt(np.square(n).sum(-1, keepdims=True))


def nearest(x: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, x)


@cache
def levels_of_radius(bits: int, head_dim: int) -> np.ndarray:
    """Levels of a triplet's norm in a unit vector, (2^bits,) float64, ascending."""
    rho = np.linspace(0, 1, 4097)
    return _lloyd_max(rho, rho**2 * (1 - rho**2) ** ((head_dim - 5) / 2), bits)


@cache
def levels_of_square(bits: int) -> np.ndarray:
    """Levels of one coordinate of a uniform direction in the square, (2^bits,) float64, ascending."""
    along = np.linspace(-1, 1, 1025)
    points = np.stack(np.meshgrid(along, along), -1)
    return _lloyd_max(along, (np.abs(folded(points)).sum(-1) ** 3).sum(0), bits)


def _lloyd_max(x: np.ndarray, density: np.ndarray, bits: int) -> np.ndarray:
    """2^bits levels on an interval, of least squared error. density: at evenly spaced x, of any scale."""
    middles = (x[1:] + x[:-1]) / 2
    weight = (density[1:] + density[:-1]) / 2
    mass, moment = (np.concatenate([[0], np.cumsum(weights)]) for weights in (weight, weight * middles))
    levels = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits), mass / mass[-1], x)
    while True:
        edges = np.concatenate([x[:1], (levels[1:] + levels[:-1]) / 2, x[-1:]])
        moved = np.diff(np.interp(edges, x, moment)) / np.diff(np.interp(edges, x, mass))
        if np.abs(moved - levels).max() < 1e-7:
            return moved
        levels = moved


def create(name: str, options: tuple[str, ...]) -> Octopus:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return Octopus(name, int(name[-1]))
