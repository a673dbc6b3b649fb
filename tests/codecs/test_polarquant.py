"""PolarQuant against its paper: the codes, the bits, the errors."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polarlm.engine import codecs
from polarlm.engine.codecs.polarquant import CENTRES
from tests.codecs.data import gaussian, streams
from tests.pairs import in_turn

CODEC = codecs.get("polarquant")
LEVELS = {head_dim: 4 if head_dim % 16 == 0 else 3 for head_dim in (8, 16, 24, 48, 64, 80, 96, 128, 256)}
every_head_dim = in_turn("head_dim levels", LEVELS.items())


def polar_transform(x, levels):
    """Definition 1 of the paper in float64: [angles of level 1, …, angles of the last level], norms of the groups."""
    radii, angles = x.astype(np.float64), []
    for level in range(1, levels + 1):
        a, b = radii[..., 0::2], radii[..., 1::2]
        angles.append(np.arctan2(b, a) % (2 * np.pi) if level == 1 else np.arctan2(b, a))
        radii = np.hypot(a, b)
    return angles, radii


def nearest(angles, level):
    """Codes of angles, and their distances from the nearest threshold, radians."""
    centres = np.array(CENTRES[level])
    if level == 1:
        return (angles // (np.pi / 8)).astype(int), np.abs(angles - np.pi / 8 * np.round(angles / (np.pi / 8)))
    thresholds = (centres[1:] + centres[:-1]) / 2
    return np.searchsorted(thresholds, angles), np.abs(angles[..., None] - thresholds).min(-1)


def stored_angles(codes, levels):
    """The codes of every level from one block's fields, read bit by bit as the layout says."""
    parts = streams(CODEC, codes)
    sixes = parts["upper6"][..., None]
    if levels == 4:
        sixes = np.concatenate([parts["upper8"][..., None] & 63, sixes], -1)
    level1 = np.stack([parts["level1"] & 15, parts["level1"] >> 4], -1)
    level2 = np.stack([sixes & 3, sixes >> 2 & 3], -1)
    angles = [x.reshape(len(sixes), -1) for x in (level1, level2, sixes >> 4)]
    if levels == 4:
        angles.append(parts["upper8"] >> 6)
    return angles


def test_bits_match_the_paper():
    """§4.1: 62 bits for 16 values."""
    for head_dim, block_size in product(range(16, 272, 16), [4, 16, 64]):
        assert codecs.bits_per_value(CODEC, block_size, head_dim) == 3.875, (head_dim, block_size)


@every_head_dim
def test_codes_match_the_angles(head_dim, levels):
    x = gaussian(400, head_dim)
    codes = CODEC.encode(x)
    angles, radii = polar_transform(x, levels)
    assert np.allclose(codes["radius"], radii, rtol=2**-11 + 2**levels * np.finfo(np.float32).eps)
    for level, (stored, exact) in enumerate(zip(stored_angles(codes, levels), angles, strict=True), start=1):
        expected, distance = nearest(exact, level)
        assert (stored == expected)[distance > 1e-6].all()
        assert np.mean(distance > 1e-6) > 0.999


@settings(deadline=None, max_examples=100)
@given(hnp.arrays(np.float32, (4, 16), elements=st.floats(-1e4, 1e4, width=32)))
def test_codes_match_the_angles_of_any_values(x):
    x = np.where(np.abs(x) < 1e-12, np.float32(0), x)  # their squares would be denormal
    codes = CODEC.encode(x)
    angles, _ = polar_transform(x, 4)
    for level, (stored, exact) in enumerate(zip(stored_angles(codes, 4), angles, strict=True), start=1):
        expected, distance = nearest(exact, level)
        assert (stored == expected)[distance > 1e-6].all()


@every_head_dim
def test_decode_is_the_inverse_transform_of_the_centres(head_dim, levels):
    """Algorithm 1, DeQuant, in float64, within four roundings: two table entries and two products; radii as stored."""
    codes = CODEC.encode(gaussian(64, head_dim))
    radii = codes["radius"].astype(np.float64)
    for level, stored in reversed(list(enumerate(stored_angles(codes, levels), start=1))):
        angles = np.array(CENTRES[level])[stored]
        radii = np.stack([radii * np.cos(angles), radii * np.sin(angles)], -1).reshape(len(stored), -1)
    assert np.allclose(CODEC.decode(codes), radii, rtol=4 * np.finfo(np.float32).eps, atol=1e-12)


def test_error_on_gaussian_vectors():
    x = gaussian(16_384, 128)
    assert np.square(CODEC.decode(CODEC.encode(x)) - x).mean() == pytest.approx(0.0321, rel=0.01)
