"""The ops of layers whose state is not K/V, in NumPy: short convolutions, gated delta rules and Mamba 2.

Rows of a block are computed together. Of a gated delta rule, their updates u solve a lower triangular system (Yang et
al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024, §3, and "Gated Delta Networks",
2024, §3.3). Of Mamba 2, each reads the matrix at the start of the block and the updates of the rows before it (Dao and
Gu, "Transformers are SSMs", 2024, §6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polarlm.engine.backends.delta import (
    DeltaEnds,
    DeltaSlots,
    DeltaSpan,
    DeltaWeights,
    FetchStates,
    Mamba2Weights,
    SlotRows,
)
from polarlm.engine.backends.numpy.rows import quiet, rms_norm
from polarlm.engine.quantization.snapshot_codes import SnapshotCodes
from polarlm.model_loaders.config import Recurrent


def convolve(new: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, inputs: np.ndarray, place: int) -> np.ndarray:
    """silu of the convolution of rows (count, C), which are added to a slot's `inputs`."""
    count, width = len(new), len(conv)
    inputs[place + width - 1 : place + width - 1 + count] = new
    sums = sum(weight * inputs[place + back : place + back + count] for back, weight in enumerate(conv))
    return silu(np.asarray(sums if bias is None else sums + bias))


def add_decays(decays: np.ndarray, new: np.ndarray, place: int) -> np.ndarray:
    """Append the logarithms (…, count) of the decays of rows to a slot's (…, N), and return their part of it."""
    before = decays[..., place - 1 : place] if place else np.float32(0)
    new_decays = decays[..., place : place + new.shape[-1]]
    new_decays[...] = before + np.cumsum(new, axis=-1)
    return new_decays


def decays_between(decays: np.ndarray, place: int, count: int) -> np.ndarray:
    """How much of the update of each token is left at each of the rows, (…, count, place + count); 0 of later ones."""
    new_decays, end = decays[..., place : place + count], place + count
    sees = np.tri(count, end, place, dtype=bool)
    return np.exp(np.where(sees, new_decays[..., None] - decays[..., None, :end], -np.inf))


def keys_of_heads(key_heads: int, heads: int, *, tiled: bool) -> np.ndarray:
    """The key head of each value head, (H,)."""
    return np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.float32(0), x)


_EPS = np.float32(1e-6)  # added to squared lengths of queries and keys


def _add_gated_delta_rows(rows: np.ndarray, w: DeltaWeights, slots: DeltaSlots, slot: int, place: int) -> np.ndarray:
    """Add rows of one block to a slot, and return what their queries read: (count, H, D)."""
    _, key_heads, key_dim, _ = slots.keys.shape
    _, heads, _, dim = slots.updates.shape
    count, end, channels = len(rows), place + len(rows), slots.inputs.shape[2]
    x = convolve(rows[:, :channels], w.conv, None, slots.inputs[slot], place)
    q, k, v = np.split(x, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (_normalize(x.reshape(count, key_heads, key_dim)).transpose(1, 0, 2) for x in (q, k))
    v = v.reshape(count, heads, dim).transpose(1, 0, 2)
    b, a = rows[:, channels + heads * dim :].T.reshape(2, heads, count)
    key_head = keys_of_heads(key_heads, heads, tiled=w.tiled)

    decays, updates = slots.decays[slot], slots.updates[slot]
    new_decays = add_decays(decays, w.decay[:, None] * softplus(a + w.dt_bias[:, None]), place)
    slots.keys[slot, :, :, place:end] = k.transpose(0, 2, 1)
    keys, matrix = slots.keys[slot, :, :, :end], slots.matrices[slot]
    start_decay, pair_decays = np.exp(new_decays)[..., None], decays_between(decays, place, count)
    _update(updates, place, v, b, start_decay * (k[key_head] @ matrix), pair_decays * (k @ keys)[key_head])
    read = start_decay * (q[key_head] @ matrix)
    read += pair_decays * (q @ keys)[key_head] @ updates[:, :end]
    return read.transpose(1, 0, 2) * np.float32(key_dim**-0.5)


def _update(
    updates: np.ndarray, place: int, v: np.ndarray, b: np.ndarray, read: np.ndarray, scores: np.ndarray
) -> None:
    """Add the updates of rows to a slot's (H, N, D). v (H, count, D): their values. read: what their keys read of the
    matrix. scores (H, count, place + count): what they read of the updates."""
    count, beta = v.shape[1], sigmoid(b)[..., None]
    weights = beta * scores
    new = beta * (v - read) - weights[..., :place] @ updates[:, :place]
    system = np.tril(weights[..., place:], -1) + np.eye(count, dtype=np.float32)
    updates[:, place : place + count] = np.linalg.solve(system, new)


def _add_channel_delta_rows(
    rows: np.ndarray, logits: np.ndarray, w: DeltaWeights, slots: DeltaSlots, slot: int, place: int
) -> np.ndarray:
    """As `_add_gated_delta_rows`, of keys whose channels decay by themselves. logits (count, H·A): of decays."""
    _, heads, key_dim, _ = slots.keys.shape
    count, end, channels = len(rows), place + len(rows), slots.inputs.shape[2]
    x = convolve(rows[:, :channels], w.conv, None, slots.inputs[slot], place)
    q, k, v = (
        x.reshape(count, heads, -1).transpose(1, 0, 2) for x in np.split(x, [heads * key_dim, 2 * heads * key_dim], 1)
    )
    q, k = _normalize(q), _normalize(k)
    steps = softplus(logits + w.dt_bias).reshape(count, heads, key_dim).transpose(1, 2, 0)

    decays, updates, matrix = slots.decays[slot], slots.updates[slot], slots.matrices[slot]
    start_decay = np.exp(add_decays(decays, w.decay[:, None, None] * steps, place)).swapaxes(1, 2)  # (H, count, A)
    slots.keys[slot, :, :, place:end] = k.swapaxes(1, 2)
    pairs = decays_between(decays, place, count) * slots.keys[slot, :, :, None, :end]  # (H, A, count, end)
    key_scores, query_scores = (np.einsum("hta,hati->hti", one, pairs) for one in (k, q))
    b = rows[:, channels : channels + heads].T
    _update(updates, place, v, b, (start_decay * k) @ matrix, key_scores)
    read = (start_decay * q) @ matrix + query_scores @ updates[:, :end]
    return read.transpose(1, 0, 2) * np.float32(key_dim**-0.5)


def _normalize(x: np.ndarray) -> np.ndarray:
    """Vectors (..., A) of length 1."""
    return x / np.sqrt(np.vecdot(x, x)[..., None] + _EPS)


def _add_mamba2_rows(rows: np.ndarray, w: Mamba2Weights, slots: DeltaSlots, slot: int, place: int) -> np.ndarray:
    """Add rows [x | B | C | dt] of one block to a slot, and return what their queries read: (count, I)."""
    _, groups, size, _ = slots.keys.shape
    _, heads, _, dim = slots.updates.shape
    count, end, channels = len(rows), place + len(rows), slots.inputs.shape[2]
    mixed = convolve(rows[:, :channels], w.conv, w.bias, slots.inputs[slot], place)
    x, k, q = np.split(mixed, [heads * dim, heads * dim + groups * size], axis=1)
    x = x.reshape(count, heads, dim).transpose(1, 0, 2)
    k, q = (part.reshape(count, groups, size).transpose(1, 0, 2) for part in (k, q))
    step = softplus(rows[:, channels:] + w.dt_bias).T  # (H, count)
    key_head = keys_of_heads(groups, heads, tiled=False)

    decays, updates = slots.decays[slot], slots.updates[slot]
    new_decays = add_decays(decays, w.decay[:, None] * step, place)
    slots.keys[slot, :, :, place:end] = k.transpose(0, 2, 1)
    updates[:, place:end] = step[..., None] * x
    read = np.exp(new_decays)[..., None] * (q[key_head] @ slots.matrices[slot])
    scores = (q @ slots.keys[slot, :, :, :end])[key_head]
    read += (decays_between(decays, place, count) * scores) @ updates[:, :end]
    read += w.skip[:, None, None] * x
    return read.transpose(1, 0, 2).reshape(count, heads * dim)


class RecurrentOps:
    """See `engine.backends.delta.RecurrentOps`."""

    def check_recurrent(self, mixer: Recurrent, block_size: int) -> None:
        """Every shape is computed."""

    @quiet
    def short_conv(self, inputs: np.ndarray, conv: np.ndarray, bias: np.ndarray | None, rows: SlotRows) -> np.ndarray:
        slots, (gate_in, gate_out, x) = rows.slots, np.split(inputs, 3, axis=1)
        before, (slot, place, following, _) = len(conv) - 1, (rows.spans - [1, 0, 1, 0]).T
        new, next_row = gate_in * x, place - (slots.shape[1] - 2 * before)
        slots[slot, before + place] = new
        is_repeated = (following >= 0) & (next_row >= 0)
        slots[following[is_repeated], next_row[is_repeated]] = new[is_repeated]
        sums = np.zeros_like(new) if bias is None else np.broadcast_to(bias, new.shape).copy()
        for back, channel_weight in enumerate(conv):
            sums += channel_weight * slots[slot, place + back]
        return gate_out * sums

    @quiet
    def gated_delta(self, projected: np.ndarray, w: DeltaWeights, rows: SlotRows) -> np.ndarray:
        slots: DeltaSlots = rows.slots
        heads, dim, channels = slots.updates.shape[1], slots.updates.shape[3], slots.inputs.shape[2]
        y = np.empty((len(projected), heads, dim), np.float32)

        def add(part: slice, slot: int, place: int) -> None:
            y[part] = _add_gated_delta_rows(projected[part], w, slots, slot, place)

        _add_by_blocks(rows, add, tiled=w.tiled)
        z = projected[:, channels : channels + heads * dim].reshape(y.shape)
        y = rms_norm(y, w.norm, w.eps)
        y *= silu(z)
        return y.reshape(len(projected), heads * dim)

    @quiet
    def channel_delta(
        self, projected: np.ndarray, decays: np.ndarray, gates: np.ndarray, w: DeltaWeights, rows: SlotRows
    ) -> np.ndarray:
        slots: DeltaSlots = rows.slots
        y = np.empty((len(projected), slots.updates.shape[1], slots.updates.shape[3]), np.float32)

        def add(part: slice, slot: int, place: int) -> None:
            y[part] = _add_channel_delta_rows(projected[part], decays[part], w, slots, slot, place)

        _add_by_blocks(rows, add, tiled=False)
        return rms_norm(y, w.norm, w.eps).reshape(gates.shape) * sigmoid(gates)

    @quiet
    def mamba2(self, projected: np.ndarray, w: Mamba2Weights, rows: SlotRows) -> np.ndarray:
        groups, inner = rows.slots.keys.shape[1], len(w.norm)
        y = np.empty((len(projected), inner), np.float32)

        def add(part: slice, slot: int, place: int) -> None:
            y[part] = _add_mamba2_rows(projected[part, inner:], w, rows.slots, slot, place)

        _add_by_blocks(rows, add, tiled=False)
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


def _add_by_blocks(rows: SlotRows, add: Callable[[slice, int, int], None], *, tiled: bool) -> None:
    """Call add(part, slot, place) for the rows of each block of each span; prompts advance at the end of a block.

    place: of the first row's token in its block.
    """
    slots, spans, ends = rows
    block = slots.keys.shape[-1]
    before = slots.inputs.shape[1] - block
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
    block, before = decays.shape[-1], inputs.shape[0] - decays.shape[-1]
    keys = slots.keys[slot][keys_of_heads(slots.keys.shape[1], len(matrix), tiled=tiled)]
    by_channel = decays if decays.ndim == 3 else decays[:, None]  # (H, A or 1, N)
    matrix *= np.exp(by_channel[..., -1:])
    matrix += keys * np.exp(by_channel[..., -1:] - by_channel) @ slots.updates[slot]
    inputs[:before] = inputs[block:].copy()
