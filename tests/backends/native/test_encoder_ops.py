"""The ops of encoders, in NumPy and in compiled kernels, against float64."""

from __future__ import annotations

from itertools import product
from math import erf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.numpy.activations import gelu
from polarlm.engine.backends.numpy.ops import NumpyOps

BACKENDS = [NumpyOps(), NativeOps()]
EPS = 1e-12


@given(st.integers(1, 70), st.integers(1, 9), st.integers(0, 99))
def test_rows_are_normed(columns: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (3 + rng.standard_normal((rows, columns))).astype(np.float32)
    weight, bias = rng.standard_normal((2, columns)).astype(np.float32)
    centred = x - x.mean(1, keepdims=True, dtype=np.float64)
    variance = (centred**2).mean(1, keepdims=True)
    for ops in BACKENDS:
        actual = x.copy()
        ops.encoder_ops.layer_norm(actual, (weight, bias, EPS))
        expected = centred / np.sqrt(variance + EPS) * weight + bias
        # The mean is rounded to 2^-24 of itself, about 3, which is more of rows that vary little.
        error = 4e-6 * (1 + np.abs(weight) / np.sqrt(variance + EPS)) * (1 + np.abs(centred) / np.sqrt(variance + EPS))
        assert (np.abs(actual - expected) <= error).all() or columns == 1


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """In float64: q (T, H, D) over k, v (T, K, D) at most window // 2 away; None: over all."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(one.astype(np.float64), group, axis=1) for one in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), k) * 0.3
    if window is not None:
        places = np.arange(len(q))
        scores[:, np.abs(places[:, None] - places) > window // 2] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(4, 4, 12, None), (12, 12, 32, None), (6, 2, 64, None), *((2, 2, 16, window) for window in (2, 7, 60, 300))],
)
def test_a_token_sees_its_own_text(
    rng: np.random.Generator, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    """Texts are shorter and longer than the sizes that there is code for (32, 64, 128) and a unit of queries (192)."""
    lengths = [1, 5, 32, 33, 64, 65, 127, 129, 400, 2]
    qkv = rng.standard_normal((sum(lengths), heads + 2 * kv_heads, dim)).astype(np.float32)
    rope = np.ones((len(qkv), dim // 2), np.float32), np.zeros((len(qkv), dim // 2), np.float32)
    q, k, v = np.split(qkv.copy(), [heads, heads + kv_heads], axis=1)
    for ops, turns in product(BACKENDS, (rope, None)):
        (transform,) = ops.prepare([HeadTransform(kv_heads)])
        actual = ops.encoder_ops.self_attention(qkv.copy(), turns, transform, lengths, 0.3, window)
        first = 0
        for length in lengths:
            text = slice(first, first + length)
            first += length
            assert np.abs(actual[text] - attention(q[text], k[text], v[text], window)).max() <= 2e-5


def test_a_vector_does_not_depend_on_the_other_texts(rng: np.random.Generator) -> None:
    lengths, heads, dim = [31, 200, 3, 64], 2, 32
    qkv = rng.standard_normal((sum(lengths), 3 * heads, dim)).astype(np.float32)
    rope = np.ones((len(qkv), dim // 2), np.float32), np.zeros((len(qkv), dim // 2), np.float32)
    (transform,) = (ops := NativeOps()).prepare([HeadTransform(heads)])
    together, first = ops.encoder_ops.self_attention(qkv.copy(), rope, transform, lengths, 0.3).copy(), 0
    for length in lengths:
        text, first = slice(first, first + length), first + length
        alone = ops.encoder_ops.self_attention(
            qkv[text].copy(), (rope[0][text], rope[1][text]), transform, [length], 0.3
        )
        np.testing.assert_array_equal(alone, together[text])


def test_gelu_is_that_of_the_normal_distribution() -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, 80.0, -80.0]]).astype(np.float32)
    exact = np.array([one / 2 * (1 + erf(one / 2**0.5)) for one in x.tolist()])
    # The formula's share of x is exact to 1.5e-7 / 2, and float32 to 6e-8.
    assert (np.abs(gelu(x[None])[0] - exact) <= 3e-7 * np.maximum(1, np.abs(x))).all()
    assert np.isnan(gelu(np.array([[np.nan]], np.float32))).all()
