"""Nearest-point search: equal to comparison with every point, ties included."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.codecs.parts.nearest import NearestPoint
from polarlm.engine.codecs.ring import RINGS, points_of

every_table = pytest.mark.parametrize("bits", RINGS)


@cache
def search(bits: int) -> NearestPoint:
    return NearestPoint(points_of(bits))


def by_comparison(points: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x (R, 2) → the first code of least |p|²/2 − x·p, float32 after each operation."""
    half = np.square(points).sum(1) / 2
    parts = [x[start : start + 4096] for start in range(0, len(x), 4096)]
    return np.concatenate(
        [(half - part[:, :1] * points[:, 0] - part[:, 1:] * points[:, 1]).argmin(1) for part in parts]
    )


def corners(bits: int) -> np.ndarray:
    axis = np.arange(-4.0625, 4.0626, 1 / 32, dtype=np.float32)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    return grid[::7] if bits == 10 else grid


@every_table
def test_it_agrees_with_a_comparison_with_every_point(bits: int) -> None:
    """Of random pairs, pairs far out, corners of cells and their neighbours in float32, points, and middles."""
    points, edges = points_of(bits), corners(bits)
    x = np.random.default_rng(bits).standard_normal((50_000, 2), np.float32)
    neighbours = [np.nextafter(edges, np.float32(towards)) for towards in (-np.inf, np.inf)]
    far = x[:5000] * np.logspace(0, 36, 5000, dtype=np.float32)[:, None]
    for pairs in (x, far, edges, *neighbours, points, (points[1:] + points[:-1]) / 2):
        codes, nearest = search(bits)(pairs)
        assert np.array_equal(codes, by_comparison(points, pairs))
        assert np.array_equal(nearest, points[codes])


@pytest.mark.parametrize("name", ["turbo2", "turbo3", "turbo4", "linear8"])
def test_values_take_the_nearest_levels(name: str) -> None:
    table = codecs.get(name).rounding
    levels, x = table.points[:, 0].astype(np.float64), np.random.default_rng(0).normal(0, 2, 20_000)
    thresholds = (levels[1:] + levels[:-1]) / 2
    is_clear = np.abs(x[:, None] - thresholds).min(-1) > 1e-5
    assert is_clear.mean() > 0.999
    codes, _ = table.nearest(x.astype(np.float32)[:, None])
    assert np.array_equal(codes[is_clear], np.searchsorted(thresholds, x)[is_clear])
