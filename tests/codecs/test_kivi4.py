"""KIVI at four bits: the formula, the grouping, the errors."""

import numpy as np
import pytest

from polarlm.engine import codecs
from tests.codecs.data import gaussian, streams
from tests.pairs import in_turn

both = pytest.mark.parametrize("name", ["kivi4", "kivi4+token"])


def grouped(x, name):
    """x (64, D) → (groups, 32): tokens of a channel, or channels of a token."""
    by_token = name.endswith("token")
    return x.reshape(-1, 32) if by_token else x.reshape(2, 32, -1).swapaxes(1, 2).reshape(-1, 32)


@both
@in_turn("head_dim", [32, 64, 96, 128, 256])
def test_codes_match_the_formula(name, head_dim):
    """In float64, from the stored scale and zero point."""
    x = gaussian(64, head_dim) + np.linspace(-5, 5, head_dim, dtype=np.float32)
    codes = codecs.get(name).encode(x)
    scale, zero = (codes[key].astype(np.float64).reshape(-1, 1) for key in ("scale", "zero"))
    exact = grouped(x, name)
    assert np.allclose(zero[:, 0], exact.min(1), rtol=2**-11)
    assert np.allclose(scale[:, 0], np.ptp(exact, axis=1) / 15, rtol=2**-11 + 1e-6)
    values = streams(codecs.get(name), codes)["codes"]
    cell = (exact - zero) / scale
    clear = np.abs(cell % 1 - 0.5) > 1e-4
    assert clear.mean() > 0.99
    assert (grouped(values, name) == np.clip(np.rint(cell), 0, 15))[clear].all()
    decoded = grouped(codecs.get(name).decode(codes), name)
    assert np.allclose(decoded, scale * grouped(values, name) + zero, rtol=0, atol=1e-5)
