"""The nearest points of tables: the same codes as in NumPy, at every level of CPU features."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.native.kernels.encode.nearest import search
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang import F32, Emitter, Level, Value, vector
from tests.jit.levels import declared, run, some_levels


@cache
def kernel(bits: int, width: int) -> Kernel:
    """Nearest points of 16 vectors of `width` coordinates, unit by 16: x and points (units, width, 16)."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        x, codes, points = args
        nearest = search(e, bits, width)
        with e.loop(begin, end) as unit:
            at = unit * (64 * width)
            found = nearest([e.load(x + at, vector(F32, 16), 64 * axis) for axis in range(width)])
            e.store(found.codes, codes + unit * 64)
            for axis, point in enumerate(found.points):
                e.store(point, points + at, 64 * axis)

    return Kernel(f"nearest_{bits}_{width}", emit, declared("x codes points"))


def pairs() -> np.ndarray:
    """Pairs of a grid that reaches beyond all tables, pairs on its axes and near them, the origin, tiny pairs and very
    large ones."""
    axis = np.linspace(-4.6, 4.6, 401)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    rng = np.random.default_rng(0)
    some = rng.standard_normal((100_000, 2))
    near = some[:50_000] * 10 ** rng.uniform(-9, 0, (50_000, 2))
    ends = np.array([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1], [-0.0, -0.0]])
    return np.concatenate([grid, some, near, ends, ends * 1e-3, ends * 7, ends * 1e9, some[:1000] * 1e6])


@some_levels
@pytest.mark.parametrize("name", ["linear8", "ring2.5", "ring3.5", "ring5", "turbo2", "turbo4"])
def test_codes_and_points_are_those_of_numpy(name: str, level: Level) -> None:
    rounding = codecs.get(name).rounding
    x = pairs().reshape(-1, rounding.width).astype(np.float32)
    x = x[: len(x) // 16 * 16]
    expected, expected_points = rounding.nearest(x)
    by_lane = np.ascontiguousarray(x.reshape(-1, 16, rounding.width).swapaxes(1, 2))
    codes, points = np.zeros(len(x), np.int32), np.zeros_like(by_lane)
    run(kernel(rounding.code_bits, rounding.width), level, len(by_lane), (by_lane, codes, points))
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(points.swapaxes(1, 2).reshape(x.shape), expected_points)


@some_levels
def test_what_is_not_finite_has_some_code(level: Level) -> None:
    """A code is an index into a table."""
    x = np.resize(np.array([np.nan, np.inf, -np.inf, 0], np.float32), (4, 2, 16))
    x[:, 1] = x[:, 1, ::-1]
    codes, points = np.full(64, -1, np.int32), np.zeros_like(x)
    run(kernel(8, 2), level, 4, (x, codes, points))
    assert ((codes >= 0) & (codes < 256)).all()
