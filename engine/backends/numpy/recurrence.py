"""What gated delta rules and Mamba 2 share in NumPy: the blocks of a span, convolutions, and the op `advance_delta`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan
from polarlm.engine.backends.numpy.rows import quiet


def add_by_blocks(
    spans: np.ndarray,
    slots: DeltaSlots,
    ends: DeltaEnds | None,
    add: Callable[[slice, int, int], None],
    *,
    tiled: bool,
) -> None:
    """Call add(rows, slot, place) for the rows of each block of each span; prompts advance at the end of a block.

    place: of the first row's token in its block. ends, tiled: as in `Ops.gated_delta`.
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
                    kept = ends.numbers.index(number)
                    ends.matrices[kept] = slots.matrices[span.slot]
                    ends.inputs[kept] = slots.inputs[span.slot, :before]
                place, number = 0, number + 1


@quiet
def advance_delta(layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
    """See `Ops.advance_delta`."""
    for layer in layers:
        for slot in slots:
            _advance(layer, slot, tiled)


def _advance(slots: DeltaSlots, slot: int, tiled: bool) -> None:
    """Make the state at the end of a complete block that at the start of the next one."""
    matrix, decays, inputs = slots.matrices[slot], slots.decays[slot], slots.inputs[slot]
    block, before = decays.shape[1], inputs.shape[0] - decays.shape[1]
    of_head = keys_of_heads(slots.keys.shape[1], len(matrix), tiled=tiled)
    to_end = np.exp(decays[:, -1:] - decays)[..., None]  # (H, N, 1)
    matrix *= np.exp(decays[:, -1])[:, None, None]
    matrix += slots.keys[slot][of_head] @ (to_end * slots.updates[slot])
    inputs[:before] = inputs[block:].copy()


def convolved(new: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, inputs: np.ndarray, place: int) -> np.ndarray:
    """silu of the convolution of rows (count, C), which are added to a slot's `inputs`."""
    count, width = len(new), len(conv)
    inputs[place + width - 1 : place + width - 1 + count] = new
    sums = sum(of_token * inputs[place + back : place + back + count] for back, of_token in enumerate(conv))
    return silu(np.asarray(sums if bias is None else sums + bias))


def add_decays(decays: np.ndarray, new: np.ndarray, place: int) -> np.ndarray:
    """Append the logarithms (H, count) of the decays of rows to a slot's (H, N), and return their part of it."""
    before = decays[:, place - 1 : place] if place else np.zeros((len(decays), 1), np.float32)
    own = decays[:, place : place + new.shape[1]]
    own[...] = before + np.cumsum(new, axis=1)
    return own


def decays_between(decays: np.ndarray, place: int, count: int) -> np.ndarray:
    """How much of the update of each token is left at each of the rows, (H, count, place + count); 0 of later ones."""
    own, end = decays[:, place : place + count], place + count
    sees = np.tri(count, end, place, dtype=bool)
    return np.exp(np.where(sees, own[..., None] - decays[:, None, :end], -np.inf))


def keys_of_heads(key_heads: int, heads: int, *, tiled: bool) -> np.ndarray:
    """The key head of each value head, (H,)."""
    return np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), x)
