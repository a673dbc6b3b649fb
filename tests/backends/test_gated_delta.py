"""Gated delta rules: prompts and steps over the ends of blocks, in NumPy and compiled, against the recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.model_loaders.config import GatedDelta
from tests.delta_rules import (
    assert_close,
    check_prompts_and_steps,
    check_rows_that_are_not_kept,
    check_several_sequences,
    span,
)
from tests.recurrence import make_rows, make_slots, make_weights, recurrence

SHAPES = [  # and the tokens of a block
    (GatedDelta(2, 4, 8, 12, 4), 16),
    (GatedDelta(2, 6, 16, 32, 3, tiled=True), 8),
    (GatedDelta(1, 1, 32, 16, 2), 12),
    (GatedDelta(3, 3, 20, 7, 4), 64),
]


def backends() -> dict[str, Callable[[], Any]]:
    """NumPy, and the compiled kernels for each level of this CPU."""
    found: dict[str, Callable[[], Any]] = {"numpy": lambda: NumpyOps(1)}
    try:
        from polarlm.engine.backends.native.recurrent import DeltaOps
        from polarlm.engine.jit.compile.target import levels
        from tests.backends.native.launching import launcher
    except ImportError:
        return found
    return found | {level.name: lambda level=level: DeltaOps(launcher(level)) for level in levels()}


BACKENDS = backends()
FULL = ("numpy", list(BACKENDS)[-1])  # every shape here; the other levels differ in how they compile a line
CASES = [
    pytest.param(name, *SHAPES[number], id=f"{name}-{number}")
    for name in BACKENDS
    for number in range(len(SHAPES))
    if name in FULL or number == 1
]
every_case = pytest.mark.parametrize(("name", "shape", "block"), CASES)


@every_case
def test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence(name: str, shape: GatedDelta, block: int) -> None:
    check_prompts_and_steps(BACKENDS[name](), shape, block)


@every_case
def test_rows_that_are_not_kept_leave_no_trace(name: str, shape: GatedDelta, block: int) -> None:
    """Compiled kernels compute a row alone as with others; products of NumPy differ by roundings."""
    ops = BACKENDS[name]()
    equal = assert_close if isinstance(ops, NumpyOps) else np.testing.assert_array_equal
    check_rows_that_are_not_kept(ops, shape, block, equal)


@pytest.mark.parametrize("name", FULL)
def test_a_step_of_several_sequences_changes_their_slots_alone(name: str) -> None:
    check_several_sequences(BACKENDS[name](), *SHAPES[0])


def test_heads_without_room_in_scratch_are_computed_by_numpy() -> None:
    pytest.importorskip("llvmlite")
    from polarlm.engine.backends.native.recurrent import DeltaOps
    from polarlm.engine.jit.compile.target import best
    from tests.backends.native.launching import launcher

    shape, block, rng = GatedDelta(1, 1, 8, 8, 2), 512, np.random.default_rng(0)
    w, rows = make_weights(rng, shape), make_rows(rng, shape, 5)
    found = DeltaOps(launcher(best())).gated_delta(rows, w, make_slots(shape, 1, block), span(0, 5))
    assert_close(found, recurrence(rows, w, shape)[0])
