"""Gated delta rules on the emulated device, against the recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.cuda.recurrent import ops as recurrent
from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaWeights
from polarlm.model_loaders.config import GatedDelta
from tests.backends import test_recurrent as bodies
from tests.cuda.emulated import EmulatedDevice, open_device
SHAPES = [  # and the tokens of a block
    (GatedDelta(2, 4, 8, 12, 4), 16),
    (GatedDelta(2, 6, 16, 32, 3, tiled=True), 8),
    (GatedDelta(1, 1, 32, 16, 2), 12),
    (GatedDelta(1, 2, 68, 72, 4), 64),  # several warps, slices of a matrix, more rows of it than a thread holds
]


class OnDevice:
    """The ops with arrays of the host, which are copied to the device and back."""

    rows_alike = isinstance(open_device(), EmulatedDevice)

    def __init__(self) -> None:
        self._ops = CudaOps(open_device())

    def gated_delta(
        self, rows: np.ndarray, w: DeltaWeights, slots: DeltaSlots, spans: np.ndarray, ends: DeltaEnds | None = None
    ) -> np.ndarray:
        to_device = self._ops.to_device
        weights = DeltaWeights(*map(to_device, w[:4]), w.eps, w.tiled)
        held = DeltaSlots(*map(to_device, slots))
        kept = None if ends is None else DeltaEnds(ends.numbers, to_device(ends.matrices), to_device(ends.inputs))
        y = self._ops.gated_delta(to_device(rows), weights, held, spans, kept)
        self._copy_back(slots, held)
        if ends is not None and kept is not None:
            self._copy_back(ends[1:], kept[1:])
        return self._ops.to_host(y)

    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        held = [DeltaSlots(*map(self._ops.to_device, layer)) for layer in layers]
        self._ops.advance_delta(held, slots, tiled=tiled)
        for layer, own in zip(layers, held, strict=True):
            self._copy_back(layer, own)

    def _copy_back(self, arrays: Sequence[np.ndarray], held: Sequence[np.ndarray]) -> None:
        for to, given in zip(arrays, held, strict=True):
            to[...] = self._ops.to_host(given)


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bodies.BACKENDS, "cuda", OnDevice)


every_shape = pytest.mark.parametrize(("shape", "block"), SHAPES)


@every_shape
@pytest.mark.parametrize("blocks", [1, 100])
def test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence(
    monkeypatch: pytest.MonkeyPatch, shape: GatedDelta, block: int, blocks: int
) -> None:
    """blocks: of a prompt that are computed at a time, at most."""
    monkeypatch.setattr(recurrent, "PROMPT_ROWS", blocks * block)
    bodies.test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence("cuda", shape, block)


@every_shape
def test_rows_that_are_not_kept_leave_no_trace(shape: GatedDelta, block: int) -> None:
    bodies.test_rows_that_are_not_kept_leave_no_trace("cuda", shape, block)


@pytest.mark.parametrize(("shape", "block"), SHAPES[:1])
def test_a_step_of_several_sequences_changes_their_slots_alone(shape: GatedDelta, block: int) -> None:
    bodies.test_a_step_of_several_sequences_changes_their_slots_alone("cuda", shape, block)
