"""The ops of encoders in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import PreparedTransform


def parts_of(qkv: np.ndarray, transform: PreparedTransform) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The queries (T, H, D), keys and values (T, K, D) in qkv (T, H + 2K, D)."""
    values = qkv.shape[1] - transform.kv_heads
    keys = values - transform.kv_heads
    return qkv[:, :keys], qkv[:, keys:values], qkv[:, values:]


def attend_to_texts(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: Sequence[int], scale: float, window: int | None
) -> np.ndarray:
    """Attention of q (T, H, D) to k, v (T, K, D) of the same text, at most window // 2 rows away → (T, H, D)."""
    out, first = np.empty(q.shape, np.float32), 0
    for length in lengths:
        text = slice(first, first + length)
        first += length
        _attend(q[text], k[text], v[text], scale, window, out[text])
    return out


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None, out: np.ndarray) -> None:
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)  # (K, G, T, D)
    scores = grouped @ (k.transpose(1, 2, 0) * np.float32(scale))[:, None]
    if window is not None and window // 2 < rows - 1:
        places = np.arange(rows)
        scores[:, :, np.abs(places[:, None] - places) > window // 2] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    out[...] = (scores @ v.swapaxes(0, 1)[:, None]).transpose(2, 0, 1, 3).reshape(out.shape)
