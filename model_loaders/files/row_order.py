"""The order of a tensor's rows: in memory, and in files that pair the channels of RoPE in other ways."""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.files.tensor_table import TensorSpec


def row_order(spec: TensorSpec, interleaved: bool) -> np.ndarray | None:
    """For each row of a tensor in a file, its row in memory, (rows,) int64; None if the order is the same.

    In memory, RoPE's pairs are channels D/2 apart. In a file they are rotary_dim/2 apart, or neighbours if
    `interleaved`; channels that RoPE does not rotate follow in the file, and are paired with each other in memory.
    """
    attention = spec.attention
    if attention is None or not (interleaved or attention.rotary_dim):
        return None
    head = head_order(attention.head_dim, attention.rotated, interleaved)
    order = np.arange(spec.shape[0])
    rotated = spec.rotated_heads * attention.head_dim
    order[:rotated] = (order[:rotated].reshape(-1, attention.head_dim)[:, :1] + head).ravel()
    return order


def head_order(head_dim: int, rotary_dim: int, interleaved: bool) -> np.ndarray:
    """`row_order` of one head, (D,) int64.

    >>> head_order(6, 6, interleaved=True).tolist()
    [0, 3, 1, 4, 2, 5]
    >>> head_order(8, 4, interleaved=False).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    rotated, passed = np.arange(rotary_dim), np.arange(head_dim - rotary_dim)
    pairs, left = rotary_dim // 2, (head_dim - rotary_dim) // 2
    pair, half = (rotated // 2, rotated % 2) if interleaved else (rotated % pairs, rotated // pairs)
    after = pairs + passed % max(1, left) + passed // max(1, left) * (head_dim // 2)
    return np.concatenate([pair + half * (head_dim // 2), after])
