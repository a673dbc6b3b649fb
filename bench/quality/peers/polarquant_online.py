"""PolarQuant with codebooks learned from each prompt and layer, for measurements only.

It has the fields and bits per value of `polarquant`. Its centres are found by k-means on the angles of the first
blocks that the codec encodes: sixteen on [0, 2π) for level 1, four on [0, π/2] for each higher level. So only the
instance that encoded a block can decode it, and each layer needs an instance for keys and one for values: no two are
equal, and layers are encoded apart.

Source: Han et al., "PolarQuant: Quantizing KV Caches with Polar Transformation", 2025, §4.1 and the online variant of
§5 (1-D k-means++ on the angles of the prompt, at prefill). Seeds: Arthur and Vassilvitskii, "k-means++: The Advantages
of Careful Seeding", 2007. One start is the offline codebook, so no level has a larger error on its samples than that.
Decode, per value: one lookup of a cosine or a sine and one multiplication for level 1, and nearly as many for all
higher levels together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from polarlm.engine.codecs.polarquant import CENTRES, PolarQuant, chosen_preconditioning, level_count, rows_of
from polarlm.engine.codecs.schema.arrays import require_finite
from polarlm.engine.codecs.schema.joined import split

NAMES = ("polarquant-online",)

_TOKENS = 4096  # most tokens to learn from
_STARTS = 4  # starts from k-means++, besides the offline codebook
_SEED = 20250204


@dataclass(frozen=True, eq=False)
class OnlinePolarQuant(PolarQuant):
    """PolarQuant with its own codebook.

    codebook: level → ascending centres, (16,) or (4,) float32, radians. Empty until the first block that is not all
    zeros is encoded; fixed after that.
    """

    codebook: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    __eq__, __hash__ = object.__eq__, object.__hash__

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        x = require_finite(x, self.name)
        self.check(x.shape[-1], x.shape[-2])
        if not self.codebook and x.any():
            self.codebook.update(_learn(x.reshape(-1, x.shape[-1])))
        return super().encode(x)

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        radii = streams["radius"].astype(np.float32)
        for level, code in reversed(list(enumerate(angles_of(streams), start=1))):
            split = out.reshape(*code.shape, 2) if level == 1 else np.empty((*code.shape, 2), np.float32)
            centres = self._centres(level)
            np.multiply(np.cos(centres)[code], radii, out=split[..., 0])
            np.multiply(np.sin(centres)[code], radii, out=split[..., 1])
            radii = split.reshape(*code.shape[:-1], 2 * code.shape[-1])

    def angles(self, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        codes, radii = [], x
        for level in range(1, level_count(x.shape[-1]) + 1):
            centres = self._centres(level)
            angles, radii = _polar(radii, level)
            codes.append(np.searchsorted((centres[1:] + centres[:-1]) / 2, angles).astype(np.uint8))
        return codes, radii

    def _centres(self, level: int) -> np.ndarray:
        return self.codebook.get(level, np.array(CENTRES[level], np.float32))


def angles_of(streams: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Streams → codes of the angles of every level, (..., N, D/2) uint8 and so on."""
    rows = rows_of(streams)
    level2 = np.stack([rows & 3, rows >> 2 & 3], -1).reshape(*rows.shape[:-1], 2 * rows.shape[-1])
    level4 = [streams["upper8"] >> 6] if "upper8" in streams else []
    return [split(streams["level1"], 4), level2, rows >> 4 & 3, *level4]


def _polar(radii: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray]:
    """radii (..., 2n), for level 1 values → angles (..., n), in [0, 2π) for level 1, else [0, π/2]; radii (..., n)."""
    a, b = radii[..., 0::2], radii[..., 1::2]
    angles = np.arctan2(b, a)
    if level == 1:
        angles = np.where(angles < 0, angles + np.float32(2 * np.pi), angles)
    with np.errstate(over="ignore"):
        return angles, np.hypot(a, b)


def _learn(tokens: np.ndarray) -> dict[int, np.ndarray]:
    """The codebook, level → centres, for tokens (M, D), not all zero. Angles of pairs of zeros are ignored."""
    radii = tokens[:: 1 + len(tokens) // _TOKENS]
    codebook = {}
    for level in range(1, level_count(tokens.shape[-1]) + 1):
        angles, radii = _polar(radii, level)
        codebook[level] = _k_means(angles[radii > 0], np.array(CENTRES[level])).astype(np.float32)
    return codebook


def _k_means(samples: np.ndarray, offline: np.ndarray) -> np.ndarray:
    """The best of several local optima for samples (S,): ascending centres, as many as in `offline`, float64."""
    values = np.sort(samples.astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(values)])

    def explained(centres: np.ndarray) -> float:
        """Σ value² minus the squared error of the centres."""
        edges = _edges(values, centres)
        return float((2 * centres * np.diff(sums[edges]) - centres**2 * np.diff(edges)).sum())

    starts = [offline, *_seeds(values, len(offline))]
    return max((_lloyd(values, sums, start) for start in starts), key=explained)


def _edges(values: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Ascending values, ascending centres (C,) → the bounds of the centres' cells among the values, (C + 1,)."""
    return np.concatenate([[0], np.searchsorted(values, (centres[1:] + centres[:-1]) / 2), [len(values)]])


def _lloyd(values: np.ndarray, sums: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Centres from Lloyd's iteration until no sample changes its cell; sums: cumulative sums of the values."""
    edges = _edges(values, centres)
    while True:
        counts = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(counts, 1)
        centres = np.where(counts > 0, means, centres)
        moved = _edges(values, centres)
        if np.array_equal(moved, edges):
            return centres
        edges = moved


def _seeds(values: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yields k-means++ seeds: samples drawn with a probability proportional to the squared distance from the centres
    so far."""
    random = np.random.default_rng(_SEED)
    for _ in range(_STARTS):
        centres = [random.choice(values)]
        squared = np.square(values - centres[0])
        while len(centres) < count:
            total = np.cumsum(squared)
            centres.append(values[min(np.searchsorted(total, random.random() * total[-1]), len(values) - 1)])
            squared = np.minimum(squared, np.square(values - centres[-1]))
        yield np.sort(centres)


def create(name: str, options: tuple[str, ...]) -> OnlinePolarQuant:
    """The codec of this name. Raises ValueError on any option but one preconditioning."""
    return OnlinePolarQuant("+".join((name, *options)), chosen_preconditioning(name, options))
