"""Designs the scalar quantizers of `turbo` and `polarquant`, by Lloyd's algorithm on a density instead of samples.

    python -m scripts.lloyd

prints the constants that the two codecs hold; tests derive them again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


def lloyd(density: Callable[[np.ndarray], np.ndarray], low: float, high: float, count: int) -> np.ndarray:
    """`count` ascending centres on [low, high] of least mean squared error, (count,) float64.

    `density` maps an array of points to weights of any scale. Cells end halfway between centres, and a centre is the
    mean of its cell (Lloyd, IEEE Trans. Inf. Theory 28(2), 1982); the integrals are Gauss–Legendre sums. For a density
    whose logarithm is concave the optimum is unique, so the start does not matter.
    """
    centres = low + (high - low) * (np.arange(count) + 0.5) / count
    while True:
        edges = np.concatenate([[low], (centres[1:] + centres[:-1]) / 2, [high]])
        half = np.diff(edges)[:, None] / 2
        points = edges[:-1, None] + half * (1 + _NODES)
        mass = density(points) * _WEIGHTS * half
        moved = (mass * points).sum(1) / mass.sum(1)
        if np.abs(moved - centres).max() < 1e-14 * (high - low):
            return moved
        centres = moved


def polar_angles(level: int) -> np.ndarray:
    """The four centres of a polar angle of level ≥ 2 on [0, π/2], in radians.

    An angle between two radii of 2^(level−1) Gaussian values each has a density proportional to sin^(2^(level−1) −
    1)(2θ) (Han et al., "PolarQuant", 2025, Lemma 2).
    """
    exponent = 2 ** (level - 1) - 1
    return lloyd(lambda angle: np.sin(2 * angle) ** exponent, 0.0, np.pi / 2, 4)


def gaussian_levels(bits: int) -> np.ndarray:
    """The positive half of the 2^bits levels of least mean squared error for N(0, 1), ascending."""
    # Beyond 12 standard deviations the density is negligible in float64.
    return lloyd(lambda x: np.exp(-(x**2) / 2), -12.0, 12.0, 2**bits)[2 ** (bits - 1) :]


if __name__ == "__main__":
    for bits in (2, 3, 4):
        print(f"turbo, {bits} bits, positive levels:", *gaussian_levels(bits))
    for level in (2, 3, 4):
        print(f"polarquant, angles of level {level}, radians:", *polar_angles(level))
