"""The trellis: best paths, points at the means of their pairs, and less error than rings of equal bits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polarlm.engine import codecs
from polarlm.engine.codecs.parts.cosets import STATES
from polarlm.engine.codecs.parts.viterbi import PathSearch, flip
from polarlm.engine.codecs.trellis import points_of
from tests.codecs.data import gaussian, stored_norms
from tests.pairs import in_turn

NAMES = {"trellis2.5": 5, "trellis3": 6, "trellis3.5": 7, "trellis4": 8}
every_trellis = pytest.mark.parametrize(("name", "bits"), NAMES.items())


def by_window(bits: int, codes: np.ndarray) -> np.ndarray:
    """codes (R, P) → points (R, 2P): the table with the signs of the last two bits of the previous code."""
    points = np.empty((*codes.shape, 2), np.float32)
    for row, j in np.ndindex(*codes.shape):
        state = codes[row, j - 1] & 3 if j else 0
        x, y = points_of(bits)[codes[row, j]]
        points[row, j] = -x if state & 1 else x, -y if state & 2 else y
    return points.reshape(len(codes), -1)


def small_search(seed):
    """A table of 8 points, two in each coset, and all paths of four pairs over it."""
    search = PathSearch(np.clip(gaussian(8, 2, seed=seed), -2.8, 2.8))
    return search, np.array(list(product(range(8), repeat=4)), np.uint8)


def middles(x):
    """x moved to the middles of its cells, where the candidates are the nearest points."""
    return ((np.floor(x * 32) + 0.5) / 32).astype(np.float32)


def path_cost(x, points, feedback, weights):
    """x, points (..., D) → Σ_j w_j·|e_j + F_j·e_{<j}|² for one head, (...)."""
    errors = x.astype(np.float64) - points
    squared = np.square(errors + errors @ feedback.T.astype(np.float64))
    return squared.reshape(*squared.shape[:-1], -1, 2).sum(-1) @ weights


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_no_path_is_better_in_the_middle_of_cells(seed):
    """Of all 8⁴ paths, with and without weights of the pairs."""
    search, paths = small_search(seed)
    x = middles(gaussian(1, 20, 8, seed=seed + 1))
    for weights in (np.ones((1, 4), np.float32), np.array([[1, 0.1, 3, 0.5]], np.float32)):
        costs = path_cost(x[0, :, None], search.points(paths), np.zeros((8, 8)), weights[0])
        codes, points = search(x, weights=None if (weights == 1).all() else weights)
        assert np.array_equal(points, search.points(codes))
        reached = costs[np.arange(20), codes[0].astype(int) @ [512, 64, 8, 1]]
        assert reached == pytest.approx(costs.min(1), rel=1e-5)


def strict_feedback(dim, scale, *heads, seed=2):
    pair = np.arange(dim) // 2
    return np.where(pair[:, None] > pair, gaussian(*heads, dim, dim, seed=seed) * np.float32(scale), np.float32(0))


def by_survivors(points, x, feedback, weights):
    """One vector (D,), float64: a survivor for each state, each with all its errors → codes (P,)."""
    survivors = [(0.0, [], np.zeros_like(x))]
    for j in range(len(x) // 2):
        pair, extended = slice(2 * j, 2 * j + 2), []
        for cost, codes, errors in survivors:
            state = codes[-1] % STATES if codes else 0
            aim = x[pair] + feedback[pair] @ errors
            squared = np.square(points - middles(np.clip(flip(aim, state), -3.99, 3.99))).sum(1)
            for coset in range(STATES):
                code = coset + STATES * int(squared[coset::STATES].argmin())
                point = flip(points[code].astype(np.float64), state)
                after = errors.copy()
                after[pair] = x[pair] - point
                extended.append((cost + weights[j] * np.square(aim - point).sum(), [*codes, code], after))
        into = [[one for one in extended if one[1][-1] % STATES == state] for state in range(STATES)]
        survivors = [min(group, key=lambda survivor: survivor[0]) for group in into]
    return min(survivors, key=lambda survivor: survivor[0])[1]


@pytest.mark.parametrize("pairs", [1, 5, 8, 9, 16, 20])
def test_each_survivor_feeds_back_its_own_errors(pairs):
    """Against a plain implementation in float64. 20 pairs are more than are reordered at every step."""
    points = points_of(6)
    x, feedback = gaussian(2, 8, 2 * pairs), strict_feedback(2 * pairs, 0.3, 2)
    weights = np.exp(gaussian(2, pairs, seed=3))
    codes, _ = PathSearch(points)(x, feedback, weights)
    for head, row in np.ndindex(2, 8):
        args = x[head, row].astype(np.float64), feedback[head].astype(np.float64), weights[head]
        assert codes[head, row].tolist() == by_survivors(points, *args)


@every_trellis
@in_turn("option", ["", "+norm16"])
def test_decode_reads_every_code_through_its_window(name, bits, option):
    codec = codecs.get(name + option)
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 8, 12), np.uint8)
    norms = np.logspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)
    fields = codec.rounding.assemble(codes, norms)
    expected = by_window(bits, codes.reshape(24, 12)).reshape(3, 8, 24) * stored_norms(codec, norms)[..., None]
    assert np.array_equal(codec.decode(fields), expected)


@pytest.mark.parametrize(
    ("name", "ring"),
    [("trellis2.5", "ring2.5"), ("trellis3", "ring3"), ("trellis3.5", "ring3.5"), ("trellis4", "ring4")],
)
def test_a_fifth_less_error_than_rings_of_equal_size(name, ring):
    x = gaussian(8, 64, 128)
    trellis, rings = codecs.get(name), codecs.get(ring)
    assert codecs.bits_per_value(trellis, 64, 128) == codecs.bits_per_value(rings, 64, 128)
    squared = [np.square(codec.decode(codec.encode(x)) - x).mean() for codec in (trellis, rings)]
    assert squared[0] < squared[1] * 0.81
