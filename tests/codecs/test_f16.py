"""Half precision: bit-equal to NumPy's conversion."""

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs.schema.arrays import widen

HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)]


def test_every_finite_half_widens_to_itself():
    wide = np.empty(FINITE.shape, np.float32)
    widen(FINITE, wide)
    assert np.array_equal(wide.view(np.uint32), FINITE.astype(np.float32).view(np.uint32))


def test_widening_works_with_strides_and_over_several_slabs():
    half = np.random.default_rng(0).standard_normal((700, 400), np.float32).astype(np.float16).T
    wide = np.empty(half.shape, np.float32)
    widen(half, wide)
    assert np.array_equal(wide, half.astype(np.float32))


def test_values_are_rounded_to_the_nearest_half_and_saturate():
    codec = codecs.get("f16")
    x = np.array([[1 / 3, -1e6, 65519.0, 6e-8, -0.0, 2**-26]], np.float32)
    expected = np.array([[1 / 3, -65504, 65504, 6e-8, -0.0, 0]], np.float16).astype(np.float32)
    assert np.array_equal(codec.decode(codec.encode(x)), expected)
