"""The ops of layers whose state is not K/V, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights, FetchStates, Mamba2Weights
from polarlm.engine.backends.numpy import gated_delta, mamba2
from polarlm.engine.backends.numpy.recurrence import keys_of_heads, silu
from polarlm.engine.backends.numpy.rows import quiet, rms_norm
from polarlm.engine.quantization.snapshot_codes import SnapshotCodes
from polarlm.model_loaders.config import Recurrent


class RecurrentOps:
    """See `engine.backends.delta.RecurrentOps`."""

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        """Every shape is computed."""

    @quiet
    def short_conv(
        self, inputs: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, slots: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        gate_in, gate_out, x = np.split(inputs, 3, axis=1)
        before, (slot, place, following, _) = len(conv) - 1, (rows - [1, 0, 1, 0]).T
        new, next_row = gate_in * x, place - (slots.shape[1] - 2 * before)
        slots[slot, before + place] = new
        is_repeated = (following >= 0) & (next_row >= 0)
        slots[following[is_repeated], next_row[is_repeated]] = new[is_repeated]
        sums = np.zeros_like(new) if bias is None else np.broadcast_to(bias, new.shape).copy()
        for back, channel_weight in enumerate(conv):
            sums += channel_weight * slots[slot, place + back]
        return gate_out * sums

    @quiet
    def gated_delta(
        self,
        projected: np.ndarray,
        w: DeltaWeights,
        slots: DeltaSlots,
        spans: np.ndarray,
        ends: DeltaEnds | None = None,
    ) -> np.ndarray:
        heads, dim, channels = slots.updates.shape[1], slots.updates.shape[3], slots.inputs.shape[2]
        y = np.empty((len(projected), heads, dim), np.float32)

        def add(rows: slice, slot: int, place: int) -> None:
            y[rows] = gated_delta.add_rows(projected[rows], w, slots, slot, place)

        _add_by_blocks(spans, slots, ends, add, tiled=w.tiled)
        z = projected[:, channels : channels + heads * dim].reshape(y.shape)
        y = rms_norm(y, w.norm, w.eps)
        y *= silu(z)
        return y.reshape(len(projected), heads * dim)

    @quiet
    def mamba2(
        self,
        projected: np.ndarray,
        w: Mamba2Weights,
        slots: DeltaSlots,
        spans: np.ndarray,
        ends: DeltaEnds | None = None,
    ) -> np.ndarray:
        groups, inner = slots.keys.shape[1], len(w.norm)
        y = np.empty((len(projected), inner), np.float32)

        def add(rows: slice, slot: int, place: int) -> None:
            y[rows] = mamba2.add_rows(projected[rows, inner:], w, slots, slot, place)

        _add_by_blocks(spans, slots, ends, add, tiled=False)
        y *= silu(projected[:, :inner])
        parts = y.reshape(len(y), groups, inner // groups)
        return rms_norm(parts, w.norm.reshape(groups, -1), w.eps).reshape(y.shape)

    @quiet
    def advance_delta(self, layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
        for layer in layers:
            for slot in slots:
                _advance(layer, slot, tiled)

    def assign(self, target: np.ndarray, x: np.ndarray | float) -> None:
        target[...] = x

    def keep_states(self, ends: DeltaEnds, codes: SnapshotCodes) -> FetchStates:
        snapshot = {**codes.encode(ends.matrices), "inputs": np.array(ends.inputs)}
        return lambda: snapshot

    def restore_states(self, snapshot: Mapping[str, np.ndarray], codes: SnapshotCodes) -> np.ndarray:
        return codes.decode(snapshot)


def _add_by_blocks(
    spans: np.ndarray, slots: DeltaSlots, ends: DeltaEnds | None, add: Callable[[slice, int, int], None], *, tiled: bool
) -> None:
    """Call add(rows, slot, place) for the rows of each block of each span; prompts advance at the end of a block.

    place: of the first row's token in its block.
    """
    block, before = slots.decays.shape[2], slots.inputs.shape[1] - slots.decays.shape[2]
    for span in map(DeltaSpan._make, spans.tolist()):
        row, place, left, number = span.first, span.place, span.rows, 0
        while left:
            count = min(left, block - place)
            add(slice(row, row + count), span.slot, place)
            row, left, place = row + count, left - count, place + count
            if place == block and ends is not None:
                _advance(slots, span.slot, tiled)
                if number in ends.numbers:
                    kept_row = ends.numbers.index(number)
                    ends.matrices[kept_row] = slots.matrices[span.slot]
                    ends.inputs[kept_row] = slots.inputs[span.slot, :before]
                place, number = 0, number + 1


def _advance(slots: DeltaSlots, slot: int, tiled: bool) -> None:
    """Make the state at the end of a complete block the state at the start of the next one."""
    matrix, decays, inputs = slots.matrices[slot], slots.decays[slot], slots.inputs[slot]
    block, before = decays.shape[1], inputs.shape[0] - decays.shape[1]
    key_head = keys_of_heads(slots.keys.shape[1], len(matrix), tiled=tiled)
    end_decays = np.exp(decays[:, -1:] - decays)[..., None]  # (H, N, 1)
    matrix *= np.exp(decays[:, -1])[:, None, None]
    matrix += slots.keys[slot][key_head] @ (end_decays * slots.updates[slot])
    inputs[:before] = inputs[block:].copy()
