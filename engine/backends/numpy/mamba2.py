"""Mamba 2 in NumPy: the op `mamba2`.

Rows of a block are computed together (Dao and Gu, "Transformers are SSMs", 2024, §6): each reads the matrix at the
start of the block, and the updates of the rows before it.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.delta import DeltaSlots, Mamba2Weights
from polarlm.engine.backends.numpy.recurrence import add_decays, convolve, decays_between, keys_of_heads, softplus


def add_rows(rows: np.ndarray, w: Mamba2Weights, slots: DeltaSlots, slot: int, place: int) -> np.ndarray:
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
