"""Gated delta rules in NumPy: the op `gated_delta`.

Rows of a block are computed together (Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", 2024, §3, and "Gated Delta Networks", 2024, §3.3): their updates u solve a lower triangular system.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.delta import DeltaSlots, DeltaWeights
from polarlm.engine.backends.numpy.recurrence import add_decays, convolve, decays_between, keys_of_heads, softplus

_EPS = np.float32(1e-6)  # added to squared lengths of queries and keys


def add_rows(rows: np.ndarray, w: DeltaWeights, slots: DeltaSlots, slot: int, place: int) -> np.ndarray:
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
    start_decay, pair_decays = (
        np.exp(new_decays)[..., None],
        decays_between(decays, place, count),
    )  # since: the matrix, (H, count, 1)
    beta = 1 / (1 + np.exp(-b[..., None]))
    weights = beta * pair_decays * (k @ keys)[key_head]
    new = beta * (v - start_decay * (k[key_head] @ matrix)) - weights[..., :place] @ updates[:, :place]
    system = np.tril(weights[..., place:], -1) + np.eye(count, dtype=np.float32)
    updates[:, place:end] = np.linalg.solve(system, new)
    read = start_decay * (q[key_head] @ matrix)
    read += pair_decays * (q @ keys)[key_head] @ updates[:, :end]
    return read.transpose(1, 0, 2) * np.float32(key_dim**-0.5)


def _normalize(x: np.ndarray) -> np.ndarray:
    """Vectors (..., A) of length 1."""
    return x / np.sqrt(np.vecdot(x, x)[..., None] + _EPS)
