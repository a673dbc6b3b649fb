"""Slots of recurrent layers: rows that are added, copies, and which snapshots are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights, FetchStates, Mamba2Weights
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.state.layer_shapes import ArraySpec

_STEP = 4  # of the distances, in blocks, between the end of a prompt and the snapshots before it


class Prompt(NamedTuple):
    """The buffer of a prompt's growth on a card, for the layer that is being computed. ends: with numbers in the
    sequence. kept: the snapshots of the layers before it, of all cards."""

    slot: DeltaSlots  # one
    ends: DeltaEnds
    kept: dict[int, FetchStates]


class View(NamedTuple):
    """Rows of a span; see `LayerState.view`. prompts: by the ops of the card; None for a step, which has the slot
    `slot`."""

    prompts: Mapping[Ops, Prompt] | None
    slot: int
    rows: slice
    position: int


class PromptRows(NamedTuple):
    """Rows of prompts, in the form that recurrent layers take."""

    views: Sequence[View]
    block_size: int

    def compute(self, ops: Ops, op: Callable[..., Array], projected: Array, w: DeltaWeights | Mamba2Weights) -> Array:
        """Add rows to their growths with the op `gated_delta` or `mamba2` of `ops`, those of the layer."""
        results = [self._of_one_slot(ops, op, view, projected[view.rows], w) for view in self.views]
        if len(results) == 1:
            return results[0]
        y = ops.empty((len(projected), results[0].shape[1]))
        for view, result in zip(self.views, results, strict=True):
            ops.assign(y[view.rows], result)
        return y

    def _of_one_slot(
        self, ops: Ops, op: Callable[..., Array], view: View, projected: Array, w: DeltaWeights | Mamba2Weights
    ) -> Array:
        assert view.prompts is not None
        slot, ends, _ = view.prompts[ops]
        number, place = divmod(view.position, self.block_size)
        spans = np.array([DeltaSpan(0, 0, len(projected), place)], np.int32)
        return op(projected, w, slot, spans, ends._replace(numbers=[end - number for end in ends.numbers]))


def new_slots(ops: Ops, arrays: Sequence[ArraySpec], count: int) -> DeltaSlots:
    """Return slots of zeros with these arrays."""
    return DeltaSlots(*(ops.to_device(np.zeros((count, *one.shape), one.dtype)) for one in arrays))


def new_prompts(
    cards: Iterable[Ops], slot: Sequence[ArraySpec], ends: Sequence[ArraySpec], numbers: Sequence[int]
) -> dict[Ops, Prompt]:
    """Return the buffers of a prompt on each card. slot: the arrays of a slot; ends: those of one without tokens.
    numbers: of the ends to keep."""
    kept: dict[int, FetchStates] = {}
    shapes = [one.shape for one in ends if one.name in ("matrices", "inputs")]
    return {
        ops: Prompt(
            DeltaSlots(*(ops.empty((1, *one.shape)) for one in slot)),
            DeltaEnds(numbers, *(ops.empty((len(numbers), *shape)) for shape in shapes)),
            kept,
        )
        for ops in cards
    }


def one_slot(slots: DeltaSlots, slot: int) -> DeltaSlots:
    """Return one of the slots, as views."""
    return DeltaSlots(*(array[slot : slot + 1] for array in slots))


def first_tokens(slot: DeltaSlots, tokens: int) -> DeltaSlots:
    """Return what one slot has of the first `tokens` tokens of its block, as views."""
    before = slot.inputs.shape[1] - slot.decays.shape[2]
    return DeltaSlots(
        slot.matrices,
        slot.keys[:, :, :, :tokens],
        slot.updates[:, :, :tokens],
        slot.decays[:, :, :tokens],
        slot.inputs[:, : before + tokens],
    )


def copy_slot(ops: Ops, target: DeltaSlots, source: DeltaSlots, tokens: int) -> None:
    """Copy one slot with the first `tokens` tokens of its block."""
    for to, given in zip(first_tokens(target, tokens), first_tokens(source, tokens), strict=True):
        ops.assign(to, given)


def ends_to_keep(first: int, complete: int, branch: int | None) -> list[int]:
    """Return the blocks with a snapshot at their end, of a prompt's complete blocks first … complete − 1.

    These are the last one, those 4, 16, 64, … blocks before it, and the block `branch`, at whose end another prompt
    has left this one. Ascending, without block 0: it is computed again in less time than reading its state takes.

    >>> ends_to_keep(0, 30, None)
    [13, 25, 29]
    """
    distances, distance = [0], _STEP
    while distance < complete:
        distances.append(distance)
        distance *= _STEP
    wanted = {complete - 1 - one for one in distances} | ({branch} if branch is not None else set())
    return sorted(number for number in wanted if max(1, first) <= number < complete)
