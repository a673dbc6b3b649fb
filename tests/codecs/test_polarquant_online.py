"""PolarQuant with learned codebooks: not worse than the constants, and better where angles are not Gaussian."""

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.codecs.polarquant import CENTRES, angles_of
from tests.codecs.data import gaussian, streams
from tests.codecs.test_polarquant import polar_transform


def outliers(tokens, head_dim):
    """Keys before a rotation: channels of very different magnitude, some far from zero. Blocks of 64."""
    x = gaussian(tokens, head_dim)
    x *= np.geomspace(0.1, 3, head_dim, dtype=np.float32)
    x[:, 3::16] *= 10
    x[:, 5::16] += 6
    return x.reshape(-1, 64, head_dim)


def error(codec, x):
    return np.square(codec.decode(codec.encode(x)) - x).mean()


@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128])
def test_at_least_as_good_as_offline_where_angles_are_not_gaussian(head_dim):
    x = outliers(2048, head_dim)
    assert error(codecs.get("polarquant-online+none"), x) <= error(codecs.get("polarquant+none"), x)


def test_as_many_directions_as_codes_are_coded_without_error():
    """Sixteen angles that are not equally spaced: only the radius is rounded."""
    random = np.random.default_rng(0)
    directions = np.sort(np.concatenate([random.uniform(0.1, 0.5, 8), random.uniform(3, 4, 8)]))
    angle = directions[random.integers(0, 16, (64, 8))]
    x = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(64, 16).astype(np.float32)
    codec = codecs.get("polarquant-online+none")
    assert error(codec, x) < 1e-6 < error(codecs.get("polarquant+none"), x)
    assert np.allclose(codec.codebook[1], directions, atol=1e-6)


@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
def test_codes_are_the_nearest_centres(head_dim):
    """Of the float64 transform, except for angles so close to a threshold that float32 may round them across it."""
    codec, x = codecs.get("polarquant-online+none"), outliers(256, head_dim)
    stored = angles_of(streams(codec, codec.encode(x)))
    angles, _ = polar_transform(x, len(stored))
    for level, (codes, exact) in enumerate(zip(stored, angles, strict=True), start=1):
        centres = codec.codebook[level].astype(np.float64)
        thresholds = (centres[1:] + centres[:-1]) / 2
        clear = np.abs(exact[..., None] - thresholds).min(-1) > 1e-5
        assert clear.mean() > 0.99
        assert (codes == np.searchsorted(thresholds, exact))[clear].all()


def test_decode_is_the_inverse_transform_of_its_own_centres():
    codec, x = codecs.get("polarquant-online+none"), outliers(64, 64)
    codes = codec.encode(x)
    radii = codes["radius"].astype(np.float64)
    for level, stored in reversed(list(enumerate(angles_of(streams(codec, codes)), start=1))):
        angles = codec.codebook[level].astype(np.float64)[stored]
        radii = np.stack([radii * np.cos(angles), radii * np.sin(angles)], -1).reshape(*stored.shape[:-1], -1)
    # Per level a cosine of a float32 and a product.
    assert np.allclose(codec.decode(codes), radii, rtol=12 * np.finfo(np.float32).eps, atol=1e-5)


def test_the_first_nonzero_blocks_fix_the_codebook():
    codec, x = codecs.get("polarquant-online"), outliers(256, 64)
    codec.encode(np.zeros((64, 64), np.float32))
    assert not codec.codebook
    codec.encode(x)
    learned = {level: centres.copy() for level, centres in codec.codebook.items()}
    codec.encode(gaussian(4, 64, 64))
    again = codecs.get("polarquant-online")
    again.encode(x)
    for level in CENTRES:
        assert np.array_equal(codec.codebook[level], learned[level])
        assert np.array_equal(again.codebook[level], learned[level])
