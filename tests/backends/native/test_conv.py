"""Short convolutions against NumPy: rows of prompts, of several sequences, over the end of a block, and of none."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.recurrent_ops import RecurrentOps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import Level
from tests.backends.native.launching import launcher
from tests.jit.levels import some_levels
from tests.pairs import pairs

N = 8  # rows of a block
# 1 + slot, place, 1 + next slot, rows before: of a prompt, of a step over the end of a block, of another sequence.
PROMPT = [(2, place, 0, back) for back, place in enumerate((3, 4, 5))]
STEP = [(1, 6, 4, 0), (1, 7, 4, 1), (4, 0, 0, 2), (4, 1, 0, 3)]
ROWS = np.array([*PROMPT, *STEP, (3, 7, 0, 0)], np.int32)


@some_levels
def test_results_and_slots_are_those_of_numpy(level: Level) -> None:
    rng = np.random.default_rng(0)
    for width, channels, has_bias in pairs([2, 3, 4], [16, 24, 96], [False, True]):
        inputs = rng.standard_normal((len(ROWS), 3 * channels)).astype(np.float32)
        conv = rng.standard_normal((width, channels)).astype(np.float32)
        bias = rng.standard_normal(channels).astype(np.float32) if has_bias else None
        slots = rng.standard_normal((4, width - 1 + N, channels)).astype(np.float32)
        own = slots.copy()
        wanted = NumpyOps(1).short_conv(inputs, conv, bias, slots, ROWS)
        found = RecurrentOps(launcher(level)).short_conv(inputs, conv, bias, own, ROWS)
        np.testing.assert_array_equal(own, slots)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_row_without_a_slot_writes_nothing() -> None:
    slots, rows = np.ones((1, 2 + N, 16), np.float32), np.zeros((1, 4), np.int32)
    inputs, conv = np.ones((1, 48), np.float32), np.ones((3, 16), np.float32)
    RecurrentOps(launcher(best())).short_conv(inputs, conv, None, slots, rows)
    assert (slots == 1).all()
