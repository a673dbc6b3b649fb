"""Rings: the points of their designs, and their options."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.codecs.ring import NAMES, RINGS, points_of

every_design = pytest.mark.parametrize("bits", RINGS)


@every_design
def test_points_fill_their_bits_and_lie_on_rings(bits):
    phases, radii = np.transpose(RINGS[bits])
    assert phases.sum() == len(points_of(bits)) == len(np.unique(points_of(bits), axis=0)) == 2**bits
    assert (np.diff(radii) > 0).all()
    reached = np.repeat(radii, phases.astype(int))
    assert np.sort(np.hypot(*points_of(bits).T)) == pytest.approx(reached, abs=1e-6)


def test_points_of_ring5_are_images_of_those_in_a_quadrant():
    """Bit 8 of a code negates the first coordinate, bit 9 the second one."""
    quadrants = points_of(10).reshape(2, 2, 256, 2)
    assert (quadrants[0, 0] > 0).all()
    signs = [[(x, y) for x in (1, -1)] for y in (1, -1)]
    np.testing.assert_array_equal(quadrants, quadrants[0, 0] * np.float32(signs)[:, :, None])


@pytest.mark.parametrize("name", NAMES)
def test_options_may_be_in_any_order(name):
    assert codecs.get(f"{name}+dense+norm16").rotation(24) is codecs.get(f"{name}+norm16+dense").rotation(24)
    assert codecs.get(f"{name}+none").rotation(24) is None
    assert np.array_equal(codecs.get(name).rotation(24), codecs.get(f"{name}+hadamard").rotation(24))
    for options in ("dense+none", "norm16+norm16", "norm8", "dense+dense", ""):
        with pytest.raises(ValueError, match=rf"Cache type {name} has the options .*norm16.*\.$"):
            codecs.get(f"{name}+{options}")
