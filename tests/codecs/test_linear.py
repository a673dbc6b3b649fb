"""Linear: evenly spaced levels, a byte for each value."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine import codecs
from tests.codecs.data import gaussian, stored_norms, streams

LINEAR = codecs.get("linear8")


def test_error_on_gaussian_vectors() -> None:
    x = gaussian(64, 64, 128)
    assert np.square(LINEAR.decode(LINEAR.encode(x)) - x).mean() == pytest.approx(0.00012, rel=0.05)


def test_codes_are_the_nearest_levels() -> None:
    """Of values within and beyond the levels, in any order of magnitude."""
    x = gaussian(3, 16, 48) * np.logspace(-2, 2, 16, dtype=np.float32)[:, None]
    x[:, :, 0] *= 9
    norms = np.sqrt(np.square(x).mean(-1))
    fields = LINEAR.encode(x)
    levels = streams(LINEAR, fields)["codes"].view(np.uint8).reshape(x.shape) / 32 - 4
    unit = np.clip(x / norms[..., None], -4, 127 / 32)
    assert np.abs(levels - unit).max() <= 1.0001 / 64
    assert np.array_equal(LINEAR.decode(fields), (levels * stored_norms(LINEAR, norms)[..., None]).astype(np.float32))
