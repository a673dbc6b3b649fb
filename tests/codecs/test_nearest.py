"""Nearest-point search: equal to comparison with every point, ties included."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

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


def assert_agrees(bits: int, x: np.ndarray) -> None:
    codes, points = search(bits)(x)
    assert np.array_equal(codes, by_comparison(points_of(bits), x))
    assert np.array_equal(points, points_of(bits)[codes])


@every_table
def test_random_pairs(bits):
    x = np.random.default_rng(bits).standard_normal((50_000, 2), np.float32)
    assert_agrees(bits, x)


@every_table
def test_pairs_far_out(bits):
    x = np.random.default_rng(bits).standard_normal((5000, 2), np.float32)
    assert_agrees(bits, x * np.logspace(0, 36, len(x), dtype=np.float32)[:, None])


@every_table
def test_borders_and_corners_of_cells(bits):
    """Every corner of a grid of 1/32, and its neighbours in float32 on all sides."""
    axis = np.arange(-4.0625, 4.0626, 1 / 32, dtype=np.float32)
    corners = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    if bits == 10:
        corners = corners[::7]
    for towards in (-np.inf, np.inf):
        assert_agrees(bits, np.nextafter(corners, np.float32(towards)))
    assert_agrees(bits, corners)


@every_table
def test_points_and_the_middles_between_them(bits):
    points = points_of(bits)
    assert np.array_equal(search(bits)(points)[0], np.arange(len(points)))
    assert_agrees(bits, (points[1:] + points[:-1]) / 2)


def test_the_first_of_equally_near_points_wins():
    square = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]], np.float32)
    x = np.array([[0, 0], [0, 3], [-3, 0], [0, -3], [3, 0], [-0.0, -0.0], [0, 100], [-1e30, 0]], np.float32)
    assert NearestPoint(square)(x)[0].tolist() == [0, 0, 1, 2, 0, 0, 0, 1]
