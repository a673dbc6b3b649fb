"""Rows that are capped, scaled and activated in place."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.product_ops.linear import LinearOps
from polarlm.engine.backends.numpy.activations import ACTIVATIONS
from polarlm.engine.jit.lang import Level
from polarlm.model_loaders.config import is_gated
from tests.backends.native.launching import launcher
from tests.jit.levels import some_levels


@some_levels
def test_logits_are_capped_in_place(level: Level) -> None:
    """The rows may be columns of a wider array; a recorded step may have the op. The cap hides no infinity."""
    rng, launch = np.random.default_rng(0), launcher(level, 2)
    wide = (30 * rng.standard_normal((3, 9000))).astype(np.float32)
    wide[0, :4] = 0, -1e30, np.inf, np.nan
    before, x = wide.astype(np.float64), wide[:, :8999]
    with launch.record() as recording:
        LinearOps(launch).softcap(x, 30.0)
    (together,) = recording.parts
    assert len(together.launches) == 1
    LinearOps(launch).softcap(x, 30.0)
    expected = 30 * np.tanh(before[:, :8999] / 30)
    expected[0, 2] = np.nan
    np.testing.assert_allclose(x, expected, atol=30 * 2e-7)
    np.testing.assert_array_equal(wide[:, 8999], before[:, 8999])


@some_levels
def test_rows_are_scaled_and_activated_in_place(level: Level) -> None:
    """By a number in memory, or one for each row, and with columns of a wider array."""
    rng, ops = np.random.default_rng(0), LinearOps(launcher(level, 2))
    x, wide, factor = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 50), (3, 150), (1,)))
    scaled = x.copy()
    ops.scale(scaled, factor)
    ops.scale(scaled[:, :40], x[:, 40:41])
    np.testing.assert_array_equal(scaled[:, 40:], (x * factor)[:, 40:])
    np.testing.assert_array_equal(scaled[:, :40], (x * factor)[:, :40] * x[:, 40:41])
    for activation, function in ACTIVATIONS.items():
        actual = x.copy()
        if is_gated(activation):
            ops.activate(actual, wide[:, 50:100], activation)
            wanted = function(np.concatenate([x, wide[:, 50:100]], axis=1))
        else:  # the square of a ReLU is its product with what it was of
            ops.activate(actual, actual, activation)
            wanted = function(x)
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
