"""Candidates of the trellis: the nearest point of each coset to the middle of a cell."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.codecs.parts.cosets import STATES, Cosets
from polarlm.engine.codecs.trellis import points_of
from tests.codecs.data import gaussian

every_table = pytest.mark.parametrize("bits", [6, 7, 8])


def candidates(bits, targets):
    """targets (R, 2) → codes (4, R), points (4, R, 2)."""
    cosets = Cosets(points_of(bits))
    quadruples = cosets.quadruple(*targets.astype(np.float32).T)
    points = cosets.points[:, quadruples]
    return cosets.codes[:, quadruples], np.stack([points[:STATES], points[STATES:]], -1)


def squared_distances(bits, targets):
    """(4, R, points in a coset)"""
    by_coset = points_of(bits).reshape(-1, STATES, 2).swapaxes(0, 1)
    return np.square(by_coset[:, None].astype(np.float64) - targets[:, None]).sum(-1)


@every_table
def test_each_candidate_belongs_to_its_coset(bits):
    codes, points = candidates(bits, gaussian(1000, 2) * 3)
    assert (codes % STATES == np.arange(STATES)[:, None]).all()
    assert np.array_equal(points, points_of(bits)[codes])


@every_table
def test_no_point_is_nearer_to_the_middle_of_a_cell(bits):
    targets = np.random.default_rng(bits).integers(-128, 128, (5000, 2)) / 32 + 1 / 64
    _, points = candidates(bits, targets)
    # Float32 scores, below 24 each, decide.
    assert np.square(points - targets).sum(-1) == pytest.approx(squared_distances(bits, targets).min(-1), abs=2e-5)


@every_table
def test_elsewhere_a_candidate_is_nearly_as_near(bits):
    targets = np.clip(gaussian(5000, 2) * 2, -3.999, 3.999)
    _, points = candidates(bits, targets)
    squared = squared_distances(bits, targets)
    nearest = points_of(bits).reshape(-1, STATES, 2).swapaxes(0, 1)[np.arange(STATES)[:, None], squared.argmin(-1)]
    # From the middle to the corner is half a diagonal; over it, |x − p|² − |x − q|² changes by 2·|p − q| times that.
    allowed = np.sqrt(2) / 32 * np.hypot(*np.moveaxis(points - nearest, -1, 0))
    assert (np.square(points - targets).sum(-1) <= squared.min(-1) + allowed + 2e-5).all()


@every_table
def test_pairs_outside_the_square_take_the_candidates_of_the_rim(bits):
    targets = np.array([[5, 0.1], [-1e6, 3.9], [2, -1e6], [4, 4], [-9, -9]], np.float32)
    rim = np.clip(targets, -4 + 1 / 64, 4 - 1 / 64)
    assert np.array_equal(candidates(bits, targets)[0], candidates(bits, rim)[0])
