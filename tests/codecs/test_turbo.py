"""Turbo against its source: the levels, the bits, the errors."""

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.codecs.turbo import LEVELS
from tests.codecs.data import gaussian, stored_norms, streams
from tests.pairs import each, in_turn

BITS = {"turbo2": 2, "turbo3": 3, "turbo4": 4}
HEAD_DIMS = [8, 16, 48, 64, 80, 96, 128, 256]
every_type = pytest.mark.parametrize(("name", "bits"), BITS.items())


def levels_of(bits):
    half = np.array(LEVELS[bits])
    return np.concatenate([-half[::-1], half])


def stored(codes, bits):
    """The code of every value, (N, D)."""
    pairs = streams(codecs.get(f"turbo{bits}"), codes)["codes"]
    return np.stack([pairs & 2**bits - 1, pairs >> bits], -1).reshape(len(pairs), -1)


def quadrature(density, bits):
    """The mean squared error of nearest levels under a density, by quadrature on 400,000 midpoints up to ±12."""
    x = 24 * (np.arange(400_000) + 0.5) / 400_000 - 12
    weight = density(x)
    squared = np.square(x[:, None] - levels_of(bits)).min(1)
    return (weight * squared).sum() / weight.sum()


@in_turn("name head_dim", each(BITS, HEAD_DIMS))
def test_codes_are_the_nearest_levels(name, head_dim):
    bits = BITS[name]
    x = gaussian(200, head_dim) * np.logspace(-2, 3, 200, dtype=np.float32)[:, None]
    codes = codecs.get(name).encode(x)
    norm = np.sqrt(np.square(x.astype(np.float64)).mean(-1, keepdims=True))
    levels, unit = levels_of(bits), x / norm
    thresholds = (levels[1:] + levels[:-1]) / 2
    clear = np.abs(unit[..., None] - thresholds).min(-1) > 1e-5
    assert clear.mean() > 0.999
    assert (stored(codes, bits) == np.searchsorted(thresholds, unit))[clear].all()
    assert np.allclose(codes["norm"], norm[:, 0], rtol=2**-11 + head_dim * np.finfo(np.float32).eps)


@in_turn("name head_dim", each(BITS, HEAD_DIMS))
def test_decode_is_norm_times_level(name, head_dim):
    """Within two float32 roundings, of the level and of the product."""
    codes = codecs.get(name).encode(gaussian(64, head_dim))
    exact = codes["norm"].astype(np.float64)[:, None] * levels_of(BITS[name])[stored(codes, BITS[name])]
    assert np.allclose(codecs.get(name).decode(codes), exact, rtol=2 * np.finfo(np.float32).eps)


@every_type
def test_error_on_gaussian_vectors_is_that_of_the_lloyd_max_quantizer(name, bits):
    """Over its norm, a value of a Gaussian vector has density (1 − y²/D)^((D−3)/2): N(0, 1), but for the last percents.

    The norm in half precision adds less than 2⁻²² of the variance.
    """
    d = 128
    x = gaussian(16_384, d)
    squared = np.square(codecs.get(name).decode(codecs.get(name).encode(x)) - x).mean(-1)
    theory = quadrature(lambda y: np.maximum(1 - y**2 / d, 0) ** ((d - 3) / 2), bits)
    assert abs(squared.mean() - theory) < 4 * squared.std() / np.sqrt(squared.size)
    assert squared.mean() == pytest.approx(quadrature(lambda y: np.exp(-(y**2) / 2), bits), rel=0.03)


@every_type
def test_encode_equals_rounding_and_assembling(name, bits):
    """An encoder that uses `rounding` directly gets the same fields, and they decode to norm · level."""
    codec = codecs.get(name)
    assert codec.rounding.width == 1
    x = gaussian(3, 16, 64)
    norms = np.sqrt(np.square(x).mean(-1))
    codes, points = codec.rounding.nearest((x / norms[..., None]).reshape(-1, 1))
    fields = codec.rounding.assemble(codes.reshape(x.shape), norms)
    plain = codec.encode(x)
    assert all(np.array_equal(fields[key], plain[key]) for key in plain)
    read = stored_norms(codec, norms)[..., None] * points.reshape(x.shape)
    assert np.array_equal(codec.decode(fields), read)
