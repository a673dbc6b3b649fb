"""Turbo against its source: the levels, the bits, the errors."""

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.codecs.turbo import LEVELS
from tests.codecs.data import gaussian, streams
from tests.pairs import each, in_turn

BITS = {"turbo2": 2, "turbo3": 3, "turbo4": 4}
HEAD_DIMS = [8, 16, 48, 64, 80, 96, 128, 256]


def levels_of(bits):
    half = np.array(LEVELS[bits])
    return np.concatenate([-half[::-1], half])


def stored(codes, bits):
    """The code of every value, (N, D)."""
    pairs = streams(codecs.get(f"turbo{bits}"), codes)["codes"]
    return np.stack([pairs & 2**bits - 1, pairs >> bits], -1).reshape(len(pairs), -1)


@pytest.mark.parametrize(("name", "published"), [("turbo2", 0.116), ("turbo3", 0.0340), ("turbo4", 0.0093)])
def test_error_on_gaussian_vectors(name, published):
    x = gaussian(4096, 128)
    assert np.square(codecs.get(name).decode(codecs.get(name).encode(x)) - x).mean() == pytest.approx(
        published, rel=0.02
    )


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
