"""`linear` with packed weights, against the dequantized weights in float32."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("llvmlite")

from engine.backends.native.launch import Launcher
from engine.backends.native.linear import LinearOps
from engine.backends.numpy.ops import NumpyOps
from engine.weight_formats import Linear
from tests import weights


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("formats", [("q4_1", "q4_1"), ("q6_k", "q8_0")])
def test_steps_round_their_inputs_a_hundredth_as_much_as_prompts(formats: tuple[str, str], rows: int) -> None:
    """Inputs have outliers, as those of language models do."""
    rng = np.random.default_rng(0)
    stored = [weights.StoredBytes(weights.random_blocks(rng, name, 64, 256), name) for name in formats]
    x = (rng.standard_normal((rows, 256)) * rng.lognormal(0, 1, 256)).astype(np.float32)
    norm = rng.standard_normal(256).astype(np.float32), 1e-5
    want = NumpyOps().linear(x, Linear(NumpyOps().load(stored)), norm=norm, activation="silu")
    ops = LinearOps(Launcher(1))
    w = Linear(ops.load(stored))
    prompt, step = (
        np.linalg.norm(ops.linear(x, w, norm=norm, activation="silu", recorded=recorded) - want) / np.linalg.norm(want)
        for recorded in (False, True)
    )
    assert step < 2e-4
    assert step < prompt / 50
