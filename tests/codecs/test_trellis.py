"""The trellis: the best of all paths, points where their codes are taken, and less error than rings at equal bits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import codecs
from engine.codecs._viterbi import STATES, PathSearch, turn
from engine.codecs.trellis import points_of
from tests.codecs.data import gaussian

NAMES = {"trellis3": 6, "trellis3.5": 7, "trellis4": 8}
every_trellis = pytest.mark.parametrize(("name", "bits"), NAMES.items())


def by_window(bits: int, codes: np.ndarray) -> np.ndarray:
    """codes (R, P) → points (R, 2P): the table, turned by the last two bits of the code before, one by one."""
    points = np.empty((*codes.shape, 2), np.float32)
    for row, j in np.ndindex(*codes.shape):
        state = codes[row, j - 1] & 3 if j else 0
        points[row, j] = turn(points_of(bits)[codes[row, j]], state)
    return points.reshape(len(codes), -1)


def test_turns_are_right_angles():
    pairs = gaussian(50, 2)
    for quarters in range(-4, 5):
        z = (pairs[:, 0] + 1j * pairs[:, 1]) * 1j**quarters
        assert np.array_equal(turn(pairs, quarters), np.stack([z.real, z.imag], -1).astype(np.float32))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_no_path_is_better(seed):
    """All 8⁴ paths over a table of 8 points, with and without weights of the pairs."""
    search = PathSearch(np.clip(gaussian(8, 2, seed=seed), -2.8, 2.8))
    paths = np.array(list(product(range(8), repeat=4)), np.uint8)
    x = gaussian(20, 8, seed=seed + 1)
    for weights in (None, np.array([1, 0.1, 3, 0.5], np.float32)):
        squared = np.square(x[:, None] - search.points(paths)).reshape(len(x), len(paths), 4, 2).sum(-1)
        errors = (squared * (1 if weights is None else weights)).sum(-1)
        codes, points = search(x, weights=weights)
        assert np.array_equal(points, search.points(codes))
        found = errors[np.arange(len(x)), codes.astype(int) @ [512, 64, 8, 1]]
        assert found == pytest.approx(errors.min(1), rel=1e-5)


@every_trellis
def test_feedback_lowers_the_cost_that_it_stands_for(name, bits):
    """M = Lᵀ·diag(d)·L with L = 1 + F unit lower in blocks: Σ_j d_j·|e_j + F_j·e_{<j}|² is e·M·eᵀ."""
    dim = 16
    pair = np.arange(dim) // 2
    feedback = np.where(pair[:, None] > pair, gaussian(dim, dim, seed=2) / 4, 0).astype(np.float32)
    weights = np.exp(gaussian(dim // 2, seed=3) / 2)
    x = gaussian(2000, dim)

    def cost(points):
        errors = x - points
        aims = np.square(errors + errors @ feedback.T).reshape(len(x), -1, 2).sum(-1)
        return (aims @ weights).mean()

    codec = codecs.get(name)
    plain, fed = (codec.best_path(x, *metric)[1] for metric in ((), (feedback, weights)))
    assert cost(fed) < 0.9 * cost(plain)
    assert np.square(x - fed).mean() > np.square(x - plain).mean()


@every_trellis
@pytest.mark.parametrize("option", ["", "+norm16"])
def test_decode_reads_every_code_through_its_window(name, bits, option):
    codec = codecs.get(name + option)
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 8, 12), np.uint8)
    norms = np.logspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)
    fields = codec.store.assemble(codes, norms)
    expected = by_window(bits, codes.reshape(24, 12)).reshape(3, 8, 24) * codec.store.stored_norms(norms)[..., None]
    assert np.array_equal(codec.decode(fields), expected)


@every_trellis
def test_encode_takes_the_best_path_and_the_root_mean_square(name, bits):
    codec = codecs.get(name)
    x = gaussian(8, 16) * 3
    norms = np.sqrt(np.square(x).mean(-1))
    codes, points = codec.best_path(x / norms[:, None])
    encoded, fields = codec.encode(x), codec.store.assemble(codes, norms)
    assert all(np.array_equal(encoded[key], fields[key]) for key in fields)
    assert np.array_equal(codec.decode(encoded), points * codec.store.stored_norms(norms)[:, None])


@every_trellis
def test_a_point_is_the_mean_of_the_pairs_that_take_it(name, bits):
    """Lloyd's condition: distances from the means are those of means of so few pairs, to a quarter."""
    x = gaussian(4000, 64, seed=bits)
    codes, points = codecs.get(name).best_path(x)
    states = PathSearch.states(codes).reshape(-1)
    pairs, squared = x.reshape(-1, 2), np.square(x - points).reshape(-1, 2).sum(-1)
    back = np.choose(states[:, None], [turn(pairs, -state) for state in range(STATES)])
    codes = codes.reshape(-1)
    taken = np.bincount(codes, minlength=2**bits)
    means = np.stack([np.bincount(codes, back[:, axis], 2**bits) for axis in (0, 1)], -1) / taken[:, None]
    distances = np.square(means - points_of(bits)).sum(1)
    expected = np.bincount(codes, squared, 2**bits) / taken**2
    assert (distances / expected).mean() < 2


@pytest.mark.parametrize(("name", "ring"), [("trellis3", "ring3"), ("trellis3.5", "ring3.5"), ("trellis4", "ring4")])
def test_a_fifth_less_error_than_rings_of_equal_size(name, ring):
    x = gaussian(8, 64, 128)
    trellis, rings = codecs.get(name), codecs.get(ring)
    assert codecs.bits_per_value(trellis, 64, 128) == codecs.bits_per_value(rings, 64, 128)
    squared = [np.square(codec.decode(codec.encode(x)) - x).mean() for codec in (trellis, rings)]
    assert squared[0] < squared[1] * 4 / 5
