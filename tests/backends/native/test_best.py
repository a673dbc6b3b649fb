"""The best token of each row, of a kernel, as NumPy finds it."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from polarlm.engine.backends.native.kernels.rows import NONE, BestArguments, best_of_rows
from polarlm.engine.jit.lang import Level
from tests.jit.levels import run, some_levels

FEW = st.integers(1, 3), st.integers(1, 100)


def best(level: Level, x: np.ndarray, columns: int) -> list[int]:
    found = np.full(len(x), -7, np.int32)
    run(best_of_rows(), level, len(x), BestArguments(x=x, best=found, columns=columns, stride=x.strides[0]))
    return found.tolist()


@some_levels
@given(x=arrays(np.float32, st.tuples(*FEW), elements=st.floats(-3, 3, width=16)), left_out=st.integers(0, 5))
def test_the_first_of_the_largest_is_found(level: Level, x: np.ndarray, left_out: int) -> None:
    columns = max(1, x.shape[1] - left_out)
    assert best(level, x, columns) == x[:, :columns].argmax(axis=1).tolist()


@some_levels
def test_equal_ones_and_the_lowest(level: Level, rng: np.random.Generator) -> None:
    for columns in (1, 31, 32, 49152, 49155):
        x = rng.integers(0, 50, (4, columns)).astype(np.float32)
        x[1], x[2] = -np.finfo(np.float32).max, 7
        assert best(level, x, columns) == x.argmax(axis=1).tolist(), columns


@some_levels
def test_a_row_that_is_not_finite_has_none(level: Level) -> None:
    for value, place in product((np.nan, np.inf, -np.inf), (0, 40, 64, 69)):
        x = np.zeros((2, 70), np.float32)
        x[1, place] = value
        assert best(level, x, 70) == [0, NONE], (value, place)
