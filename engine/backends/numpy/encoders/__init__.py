"""The ops of encoders in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.numpy.rows import quiet


class EncoderOps:
    """See `engine.backends.encoder_ops.EncoderOps`."""

    def __init__(self, transform_heads: Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        self._transform_heads = transform_heads

    @quiet
    def layer_norm(self, x: np.ndarray, norm: tuple[np.ndarray, np.ndarray, float]) -> None:
        weight, bias, eps = norm
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.vecdot(x, x)[..., None] / np.float32(x.shape[-1])
        x *= 1 / np.sqrt(variance + np.float32(eps))
        x *= weight
        x += bias

    @quiet
    def self_attention(
        self,
        qkv: np.ndarray,
        rope: tuple[np.ndarray, np.ndarray] | None,
        transform: HeadTransform,
        lengths: Sequence[int],
        scale: float,
        window: int | None = None,
        norms: Any = None,
    ) -> np.ndarray:
        q, k, v = parts_of(qkv, transform) if rope is None else self._transform_heads(qkv, rope, transform, norms)
        out, first = np.empty(q.shape, np.float32), 0
        for length in lengths:
            own = slice(first, first + length)
            first += length
            _attend(q[own], k[own], v[own], scale, window, out[own])
        return out


def parts_of(qkv: np.ndarray, transform: HeadTransform) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The queries (T, H, D), keys and values (T, K, D) in qkv (T, H + 2K, D)."""
    values = qkv.shape[1] - transform.kv_heads
    keys = values - transform.kv_heads
    return qkv[:, :keys], qkv[:, keys:values], qkv[:, values:]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, window: int | None, out: np.ndarray) -> None:
    """Attention of q (T, H, D) to rows of k, v (T, K, D), at most window // 2 away, → out (T, H, D)."""
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
