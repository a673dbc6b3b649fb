"""exp, log, cos and sin are right, and the same on every CPU."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from polarlm.model_loaders import elementary
from tests.programs import output_of

EPS = np.finfo(np.float64).eps
RNG = np.random.default_rng(0)
EXPONENTS = np.concatenate([40 * RNG.random(20_000) - 30, -707 * RNG.random(1000), [0.0, 700.0, -708.0]])
POSITIVE = np.concatenate(
    [np.ldexp(RNG.random(20_000) + 0.5, RNG.integers(-50, 50, 20_000)), 1 + 1e-9 * RNG.random(1000)]
)
ANGLES = np.concatenate([(1 << 20) * RNG.random(20_000), -1e4 * RNG.random(1000), [0.0]])

FEATURES = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR ASIMDHP"  # which NumPy's own functions use where they are


def digest() -> str:
    found = elementary.exp(EXPONENTS), elementary.log(POSITIVE), *elementary.turns(ANGLES)
    return hashlib.sha256(b"".join(one.tobytes() for one in found)).hexdigest()


def test_they_are_as_exact_as_float64() -> None:
    exact = np.exp(EXPONENTS.astype(np.longdouble))
    assert np.abs(elementary.exp(EXPONENTS) / exact - 1).max() < 3 * EPS
    exact = np.log(POSITIVE.astype(np.longdouble))
    assert np.abs((elementary.log(POSITIVE) - exact) / exact).max() < 2 * EPS
    for found, function in zip(elementary.turns(ANGLES), (np.cos, np.sin), strict=True):
        assert np.abs(found - function(ANGLES.astype(np.longdouble))).max() < EPS
    assert elementary.exp(np.array([-np.inf, -709.0, 0.0])).tolist() == [0, 0, 1]
    assert elementary.log(np.array([0.0, 1.0])).tolist() == [-np.inf, 0]
    exponents = -np.arange(0, 128, 2) / 128
    np.testing.assert_allclose(elementary.power(5e5, exponents), 5e5**exponents, rtol=2 * EPS)


def test_they_do_not_depend_on_the_instructions_of_numpy() -> None:
    program = "from tests.model_loaders import test_elementary as t; print(t.digest())"
    found = output_of(sys.executable, "-W", "ignore", "-c", program, NPY_DISABLE_CPU_FEATURES=FEATURES)
    assert found.strip() == digest()
