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
        found = x.copy()
        ops.of_encoders.layer_norm(found, (weight, bias, EPS))
        expected = centred / np.sqrt(variance + EPS) * weight + bias
        # The mean is rounded to 2^-24 of itself, about 3, which is more of rows that vary little.
        error = 4e-6 * (1 + np.abs(weight) / np.sqrt(variance + EPS)) * (1 + np.abs(centred) / np.sqrt(variance + EPS))
        assert (np.abs(found - expected) <= error).all() or columns == 1


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """In float64: q (T, H, D) over all of k, v (T, K, D)."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(one.astype(np.float64), group, axis=1) for one in (k, v))
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 12), (12, 12, 32), (6, 2, 64)])
def test_a_token_sees_all_of_its_own_text(rng: np.random.Generator, heads: int, kv_heads: int, dim: int) -> None:
    """Of texts shorter and longer than the sizes that there is code for (32, 64, 128) and a unit of queries (192)."""
    lengths = [1, 5, 32, 33, 64, 65, 127, 129, 400, 2]
    qkv = rng.standard_normal((sum(lengths), heads + 2 * kv_heads, dim)).astype(np.float32)
    rope = np.ones((len(qkv), dim // 2), np.float32), np.zeros((len(qkv), dim // 2), np.float32)
    q, k, v = np.split(qkv.copy(), [heads, heads + kv_heads], axis=1)
    for ops, turns in product(BACKENDS, (rope, None)):
        (transform,) = ops.prepare([HeadTransform(kv_heads)])
        found = ops.of_encoders.self_attention(qkv.copy(), turns, transform, lengths, 0.3)
        first = 0
        for length in lengths:
            own = slice(first, first + length)
            first += length
            assert np.abs(found[own] - attention(q[own], k[own], v[own], 0.3)).max() <= 2e-5


@pytest.mark.parametrize("window", [2, 7, 60, 300])
def test_a_token_sees_those_of_its_text_that_are_near(rng: np.random.Generator, window: int) -> None:
    lengths, heads, dim = [1, 30, 50, 140, 260], 2, 16
    qkv = rng.standard_normal((sum(lengths), 3 * heads, dim)).astype(np.float32)
    rope = np.ones((len(qkv), dim // 2), np.float32), np.zeros((len(qkv), dim // 2), np.float32)
    expected, found = (
        ops.of_encoders.self_attention(qkv.copy(), rope, ops.prepare([HeadTransform(heads)])[0], lengths, 0.3, window)
        for ops in BACKENDS
    )
    assert np.abs(found - expected).max() <= 2e-5


def test_a_vector_does_not_depend_on_the_other_texts(rng: np.random.Generator) -> None:
    lengths, heads, dim = [31, 200, 3, 64], 2, 32
    qkv = rng.standard_normal((sum(lengths), 3 * heads, dim)).astype(np.float32)
    rope = np.ones((len(qkv), dim // 2), np.float32), np.zeros((len(qkv), dim // 2), np.float32)
    (transform,) = (ops := NativeOps()).prepare([HeadTransform(heads)])
    together, first = ops.of_encoders.self_attention(qkv.copy(), rope, transform, lengths, 0.3).copy(), 0
    for length in lengths:
        own, first = slice(first, first + length), first + length
        alone = ops.of_encoders.self_attention(qkv[own].copy(), (rope[0][own], rope[1][own]), transform, [length], 0.3)
        np.testing.assert_array_equal(alone, together[own])


def test_gelu_is_that_of_the_normal_distribution() -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, 80.0, -80.0]]).astype(np.float32)
    exact = np.array([one / 2 * (1 + erf(one / 2**0.5)) for one in x.tolist()])
    # The formula's share of x is exact to 1.5e-7 / 2, and float32 to 6e-8.
    assert (np.abs(gelu(x[None])[0] - exact) <= 3e-7 * np.maximum(1, np.abs(x))).all()
    assert np.isnan(gelu(np.array([[np.nan]], np.float32))).all()
