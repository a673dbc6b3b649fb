"""Gated delta rules in NumPy: the ops `gated_delta` and `advance_delta`.

Rows of a block are computed together (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", 2024, §3, and "Gated Delta Networks", 2024, §3.3): their updates u solve a lower triangular system.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.delta import DeltaEnds, DeltaSlots, DeltaSpan, DeltaWeights
from polarlm.engine.backends.numpy.rows import quiet, rms_norm

_EPS = np.float32(1e-6)  # of the lengths of queries and keys


@quiet
def gated_delta(
    projected: np.ndarray, w: DeltaWeights, slots: DeltaSlots, spans: np.ndarray, ends: DeltaEnds | None = None
) -> np.ndarray:
    """See `Ops.gated_delta`."""
    heads, dim = slots.updates.shape[1], slots.updates.shape[3]
    block, channels = slots.keys.shape[3], slots.inputs.shape[2]
    y = np.empty((len(projected), heads, dim), np.float32)
    for span in map(DeltaSpan._make, spans.tolist()):
        row, place, left, number = span.first, span.place, span.rows, 0
        while left:
            count = min(left, block - place)
            _add_rows(projected[row : row + count], w, slots, span.slot, place, y[row : row + count])
            row, left, place = row + count, left - count, place + count
            if place == block and ends is not None:
                _advance(slots, span.slot, w.tiled)
                if number in ends.numbers:
                    kept = ends.numbers.index(number)
                    ends.matrices[kept] = slots.matrices[span.slot]
                    ends.inputs[kept] = slots.inputs[span.slot, : len(w.conv) - 1]
                place, number = 0, number + 1
    z = projected[:, channels : channels + heads * dim].reshape(y.shape)
    y = rms_norm(y, w.norm, w.eps)
    y *= _silu(z)
    return y.reshape(len(projected), heads * dim)


@quiet
def advance_delta(layers: Sequence[DeltaSlots], slots: Sequence[int], *, tiled: bool) -> None:
    """See `Ops.advance_delta`."""
    for layer in layers:
        for slot in slots:
            _advance(layer, slot, tiled)


def _add_rows(rows: np.ndarray, w: DeltaWeights, slots: DeltaSlots, slot: int, place: int, y: np.ndarray) -> None:
    """Add rows of one block to a slot, and compute what their queries read: y (count, H, D)."""
    _, key_heads, key_dim, _ = slots.keys.shape
    _, heads, _, dim = slots.updates.shape
    count, end, channels = len(rows), place + len(rows), slots.inputs.shape[2]
    q, k, v = _convolved(rows[:, :channels], w.conv, slots.inputs[slot], place, key_heads * key_dim)
    q, k = (_normed(x.reshape(count, key_heads, key_dim)).transpose(1, 0, 2) for x in (q, k))
    v = v.reshape(count, heads, dim).transpose(1, 0, 2)
    b, a = rows[:, channels + heads * dim :].T.reshape(2, heads, count)
    of_head = _keys_of_heads(key_heads, heads, tiled=w.tiled)

    decays, updates = slots.decays[slot], slots.updates[slot]
    before = decays[:, place - 1 : place] if place else np.zeros((heads, 1), np.float32)
    decays[:, place:end] = before + np.cumsum(w.decay[:, None] * _softplus(a + w.dt_bias[:, None]), axis=1)
    slots.keys[slot, :, :, place:end] = k.transpose(0, 2, 1)
    keys, matrix, own = slots.keys[slot, :, :, :end], slots.matrices[slot], decays[:, place:end]
    since = np.exp(own)[..., None]  # the decay of the matrix: (H, count, 1)
    sees = np.tri(count, end, place, dtype=bool)
    between = np.exp(np.where(sees, own[..., None] - decays[:, None, :end], -np.inf))  # (H, count, end)
    beta = 1 / (1 + np.exp(-b[..., None]))
    weights = beta * between * (k @ keys)[of_head]
    new = beta * (v - since * (k[of_head] @ matrix)) - weights[..., :place] @ updates[:, :place]
    system = np.tril(weights[..., place:], -1) + np.eye(count, dtype=np.float32)
    updates[:, place:end] = np.linalg.solve(system, new)
    read = since * (q[of_head] @ matrix)
    read += between * (q @ keys)[of_head] @ updates[:, :end]
    y[...] = read.transpose(1, 0, 2) * np.float32(key_dim**-0.5)


def _convolved(
    new: np.ndarray, conv: np.ndarray, inputs: np.ndarray, place: int, keys: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values (count, …) of convolution inputs (count, C), which are added to a slot's `inputs`.

    keys: channels of the keys.
    """
    count, width = len(new), len(conv)
    inputs[place + width - 1 : place + width - 1 + count] = new
    sums = sum(of_token * inputs[place + back : place + back + count] for back, of_token in enumerate(conv))
    x = _silu(np.asarray(sums))
    return x[:, :keys], x[:, keys : 2 * keys], x[:, 2 * keys :]


def _advance(slots: DeltaSlots, slot: int, tiled: bool) -> None:
    """Make the state at the end of a complete block that at the start of the next one."""
    matrix, decays, inputs = slots.matrices[slot], slots.decays[slot], slots.inputs[slot]
    block, before = decays.shape[1], inputs.shape[0] - decays.shape[1]
    of_head = _keys_of_heads(slots.keys.shape[1], len(matrix), tiled=tiled)
    to_end = np.exp(decays[:, -1:] - decays)[..., None]  # (H, N, 1)
    matrix *= np.exp(decays[:, -1])[:, None, None]
    matrix += slots.keys[slot][of_head] @ (to_end * slots.updates[slot])
    inputs[:before] = inputs[block:].copy()


def _keys_of_heads(key_heads: int, heads: int, *, tiled: bool) -> np.ndarray:
    """The key head of each value head, (H,)."""
    return np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)


def _normed(x: np.ndarray) -> np.ndarray:
    """Vectors (..., A) of length 1."""
    return x / np.sqrt(np.vecdot(x, x)[..., None] + _EPS)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), x)
