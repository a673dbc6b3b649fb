"""Rings: optimal designs, their errors, and decoding to norm · points."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.codecs.ring import RINGS, points_of
from tests.codecs.data import gaussian, stored_norms
from tests.pairs import in_turn

NAMES = {"ring2.5": 5, "ring3": 6, "ring3.5": 7, "ring4": 8, "ring5": 10}
every_ring = pytest.mark.parametrize(("name", "bits"), NAMES.items())
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


@pytest.mark.parametrize(
    ("name", "target"),
    [("ring2.5", 0.0572), ("ring3", 0.0296), ("ring3.5", 0.0152), ("ring4", 0.0080), ("ring5", 0.0021)],
)
def test_error_on_normalised_gaussian_vectors(name, target):
    x = gaussian(64, 64, 128)
    x /= np.sqrt(np.square(x).mean(-1, keepdims=True))
    codec = codecs.get(name)
    assert np.square(codec.decode(codec.encode(x)) - x).mean() < 1.01 * target


@every_ring
@in_turn("option", ["", "+norm16"])
def test_decode_is_the_stored_norm_times_the_nearest_points(name, bits, option):
    codec = codecs.get(name + option)
    x = gaussian(3, 16, 48) * np.logspace(-2, 2, 16, dtype=np.float32)[:, None]
    norms = np.sqrt(np.square(x).mean(-1))
    codes, points = codec.rounding.nearest((x / norms[..., None]).reshape(-1, 2))
    fields = codec.rounding.assemble(codes.reshape(3, 16, 24), norms)
    encoded = codec.encode(x)
    assert list(encoded) == list(fields)
    assert all(np.array_equal(encoded[key], fields[key]) for key in fields)
    stored = stored_norms(codec, norms)
    assert np.array_equal(codec.decode(fields), points.reshape(x.shape) * stored[..., None])
    assert np.array_equal(codec.decode(fields), points_of(bits)[codes].reshape(x.shape) * stored[..., None])


@pytest.mark.parametrize("name", NAMES)
def test_options_may_be_in_any_order(name):
    assert codecs.get(f"{name}+dense+norm16").rotation(24) is codecs.get(f"{name}+norm16+dense").rotation(24)
    assert codecs.get(f"{name}+none").rotation(24) is None
    assert np.array_equal(codecs.get(name).rotation(24), codecs.get(f"{name}+hadamard").rotation(24))
    for options in ("dense+none", "norm16+norm16", "norm8", "dense+dense", ""):
        with pytest.raises(ValueError, match=rf"Cache type {name} has the options .*norm16.*\.$"):
            codecs.get(f"{name}+{options}")
