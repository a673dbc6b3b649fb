"""Angles of the polar transform of a model's keys, before and after preconditioning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs.polarquant import level_count

_BINS = 64


def histograms(keys: Sequence[np.ndarray]) -> list[dict[str, Any]] | None:
    """keys (T, K, D) of each layer → densities of the angles of each level of the transform; None for an unsupported
    head dim.

    A level has "edges" (radians, equal steps) and two densities over them, "as they are" and "preconditioned".
    """
    head_dim = keys[0].shape[-1]
    if head_dim % 8:
        return None
    levels = level_count(head_dim)
    rotation = codecs.get("polarquant").rotation(head_dim)
    edges = [np.linspace(0, np.pi / 2 if level else 2 * np.pi, _BINS + 1) for level in range(levels)]
    counts = {name: np.zeros((levels, _BINS)) for name in ("as they are", "preconditioned")}
    for layer in keys:
        for name, vectors in (("as they are", layer), ("preconditioned", layer @ rotation)):
            for level, angles in enumerate(polar_angles(vectors, levels)):
                counts[name][level] += np.histogram(angles, edges[level])[0]
    return [
        {"level": level + 1, "edges": edges[level].round(6).tolist()}
        | {name: _density(count[level], edges[level]).tolist() for name, count in counts.items()}
        for level in range(levels)
    ]


def polar_angles(x: np.ndarray, levels: int) -> list[np.ndarray]:
    """x (..., D) → angles of each level, (..., D/2) in [0, 2π), then (..., D/4) in [0, π/2] and so on, in radians."""
    angles, radii = [], x.astype(np.float64)
    for level in range(levels):
        a, b = radii[..., 0::2], radii[..., 1::2]
        angle = np.arctan2(b, a)
        angles.append(angle % (2 * np.pi) if level == 0 else angle)
        radii = np.hypot(a, b)
    return angles


def gaussian_density(level: int, angle: np.ndarray) -> np.ndarray:
    """The density of angles of `level` ≥ 1 for Gaussian vectors (Han et al., "PolarQuant", 2025, Lemma 2)."""
    if level == 1:
        return np.full(angle.shape, 1 / (2 * np.pi))
    exponent = 2 ** (level - 1) - 1
    # Simpson's rule over the quarter circle; the integrand is smooth and vanishes at both ends.
    grid = np.linspace(0, np.pi / 2, 2001)
    weights = np.where(np.arange(2001) % 2, 4, 2) / 3 * grid[1]
    return np.sin(2 * angle) ** exponent / (weights * np.sin(2 * grid) ** exponent).sum()


def _density(counts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return (counts / (max(counts.sum(), 1) * np.diff(edges))).round(5)
