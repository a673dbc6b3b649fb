"""Linear: evenly spaced levels, a byte for each value."""

from __future__ import annotations

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs.parts.norms import ByteNorm
from tests.codecs.data import gaussian, streams

LINEAR = codecs.get("linear8")


def test_the_norm_is_the_least_that_covers_a_vector_and_codes_are_the_nearest_levels() -> None:
    """Of vectors in any order of magnitude; values beyond the largest norm take the outermost levels."""
    x = gaussian(3, 16, 48) * np.logspace(-5, 3, 16, dtype=np.float32)[:, None]
    x[:, :, 0] *= 9
    stored = streams(LINEAR, LINEAR.encode(x))
    norms, table = ByteNorm().unpack(stored["norm"]), ByteNorm().unpack(np.arange(256))
    largest = np.abs(x).max(-1) * np.float32(32 / 127)
    for norm, least in zip(norms.ravel(), largest.ravel(), strict=True):
        assert norm == table[-1] if least > table[-1] else norm == table[table >= least].min()
    levels = stored["codes"].view(np.uint8).reshape(x.shape) / 32 - 4
    unit = np.clip(x / norms[..., None], -4, 127 / 32)
    assert np.abs(levels - unit).max() <= 1.0001 / 64
    assert np.array_equal(LINEAR.decode(LINEAR.encode(x)), (levels * norms[..., None]).astype(np.float32))
