"""Candidates of the trellis: for the middle of every cell the nearest point of each coset."""

from __future__ import annotations

import numpy as np
import pytest

from engine.codecs._cosets import STATES, Cosets
from engine.codecs.trellis import points_of
from tests.codecs.data import gaussian

every_table = pytest.mark.parametrize("bits", [6, 7, 8])


def candidates(bits, aims):
    """aims (R, 2) → codes (4, R), points (4, R, 2)."""
    cosets = Cosets(points_of(bits))
    quadruples = cosets.quadruple(np.ascontiguousarray(aims, np.float32).view(np.complex64)[:, 0])
    points = cosets.points[:, quadruples]
    return cosets.codes[:, quadruples], np.stack([points[:STATES], points[STATES:]], -1)


def squared_distances(bits, aims):
    """(4, R, points in a coset)"""
    by_coset = points_of(bits).reshape(-1, STATES, 2).swapaxes(0, 1)
    return np.square(by_coset[:, None].astype(np.float64) - aims[:, None]).sum(-1)


@every_table
def test_each_candidate_is_of_its_coset(bits):
    codes, points = candidates(bits, gaussian(1000, 2) * 3)
    assert (codes % STATES == np.arange(STATES)[:, None]).all()
    assert np.array_equal(points, points_of(bits)[codes])


@every_table
def test_at_the_middle_of_a_cell_nothing_is_nearer(bits):
    aims = np.random.default_rng(bits).integers(-128, 128, (5000, 2)) / 32 + 1 / 64
    _, points = candidates(bits, aims)
    # Scores of single precision, below 24 each, decide.
    assert np.square(points - aims).sum(-1) == pytest.approx(squared_distances(bits, aims).min(-1), abs=2e-5)


@every_table
def test_elsewhere_only_what_is_nearly_as_near(bits):
    aims = np.clip(gaussian(5000, 2) * 2, -3.999, 3.999)
    _, points = candidates(bits, aims)
    squared = squared_distances(bits, aims)
    nearest = points_of(bits).reshape(-1, STATES, 2).swapaxes(0, 1)[np.arange(STATES)[:, None], squared.argmin(-1)]
    # From the middle to the corner is half a diagonal; over it, |x − p|² − |x − q|² changes by 2·|p − q| times that.
    allowed = np.sqrt(2) / 32 * np.hypot(*np.moveaxis(points - nearest, -1, 0))
    assert (np.square(points - aims).sum(-1) <= squared.min(-1) + allowed + 2e-5).all()


@every_table
def test_far_out_counts_as_the_rim(bits):
    aims = np.array([[5, 0.1], [-1e6, 3.9], [2, -1e6], [4, 4], [-9, -9]], np.float32)
    rim = np.clip(aims, -4 + 1 / 64, 4 - 1 / 64)
    assert np.array_equal(candidates(bits, aims)[0], candidates(bits, rim)[0])
