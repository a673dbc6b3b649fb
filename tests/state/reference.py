"""Reference for attention over a stored sequence, in float64."""

from __future__ import annotations

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.kv import AttentionRule
from polarlm.engine.quantization.conditioning import centre, read_mean
from tests.ops import reference
from tests.ops.reference import causal_mask


def as_read(k: np.ndarray, v: np.ndarray, end: int, n: int, codec_k: str, codec_v: str, mean_bits: int):
    """k, v (T, K, D) float32, as tokens read them of whose sequence blocks are codes up to position `end`: (T, K, D)
    float64.

    The first block, and everything after the last complete block before `end`, are in full precision.
    """
    read_k, read_v = k.astype(np.float64), v.astype(np.float64)
    for start in range(n, end // n * n, n):
        block = slice(start, start + n)
        keys, values = k[block].swapaxes(0, 1)[:, None], v[block].swapaxes(0, 1)[:, None]  # (K, 1, N, D)
        mean = np.zeros((k.shape[1], 1, k.shape[2]))
        if mean_bits:
            keys, fields = centre(keys, mean_bits)
            mean = read_mean(fields)
        encode_k, encode_v = codecs.get(codec_k), codecs.get(codec_v)
        keys = encode_k.decode(encode_k.encode(np.ascontiguousarray(keys)))
        values = encode_v.decode(encode_v.encode(np.ascontiguousarray(values)))
        read_k[block] = (keys.astype(np.float64) + mean[..., None, :])[:, 0].swapaxes(0, 1)
        read_v[block] = values[:, 0].swapaxes(0, 1)
    return read_k, read_v


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, scale: float, window: int | None):
    """q (T, H, D) whose first row is at `position`, over k, v (S, K, D) → (T, H, D) float64, causal."""
    visible = causal_mask(position, len(q), len(k), window)
    return reference.attention(q, k, v, visible, AttentionRule(scale, window))
