"""Statistics of queries and keys against their definitions, and the smoothing computed from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from polarlm.engine.quantization.statistics import LayerStatistics, measure, neutral, smoothing
from tests.pairs import in_turn

Shape = tuple[int, int, int, int]  # T, H, K, D
N = 8


def serial(work, count):
    return [work(i) for i in range(count)]


def drawn(rng: np.random.Generator, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys whose channels and tokens differ in size, so that no two of them can be confused."""
    tokens, heads, kv_heads, dim = shape
    q = rng.normal(0.3, 1, (tokens, heads, dim)) * rng.uniform(0.2, 2, (tokens, heads, 1))
    k = rng.normal(0, 1, (kv_heads, tokens, dim)) * np.linspace(0.5, 2, dim) + rng.normal(0, 2, (kv_heads, 1, dim))
    return q.astype(np.float32), k.astype(np.float32)


def probabilities(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sink: float = -np.inf,
) -> np.ndarray:
    """Attention (T, T) of one head in float64, row by row; the first block's columns are 0. A sink of −∞ is none."""
    p = np.zeros((len(q), len(q)))
    for i in range(len(q)):
        seen = [t for t in range(i + 1) if window is None or t > i - window]
        scores = np.array([scale * (q[i] @ k[t]) for t in seen])
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(np.append(scores, sink) - max(scores.max(), sink))
        p[i, seen] = weights[:-1] / weights.sum()
    p[:, :N] = 0
    return p


def projection(q: np.ndarray) -> np.ndarray:
    """An output projection (20, H·D) for q (T, H, D)."""
    shape = 20, q.shape[1] * q.shape[2]
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def reference(
    q: np.ndarray,
    k: np.ndarray,
    output: np.ndarray,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sink_scores: np.ndarray | None = None,
) -> LayerStatistics:
    """The definitions in float64, one token after another."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    kv_heads, tokens, dim = k.shape
    group = q.shape[1] // kv_heads
    blocks = range(N, tokens - N + 1, N)
    second, mean, variance, key_variance = (np.zeros((kv_heads, *s)) for s in ((dim, dim), (dim,), (dim,), (dim,)))
    for head in range(q.shape[1]):
        kv, x = head // group, q[:, head]
        p = probabilities(
            x, k[kv], scale, window, softcap, -np.inf if sink_scores is None else float(sink_scores[head])
        )
        w = [sum(p[i, t] * (1 - p[i, t]) for t in range(tokens)) for i in range(tokens)]
        second[kv] += sum(w[i] * np.outer(x[i], x[i]) for i in range(tokens)) / sum(w) / group
        mean[kv] += sum(w[i] * x[i] for i in range(tokens)) / sum(w) / group
        variance[kv] += sum(x[i] ** 2 for i in range(tokens)) / tokens / group
    for b in blocks:
        key_variance += np.square(k[:, b : b + N] - k[:, b : b + N].mean(1, keepdims=True)).mean(1) / len(blocks)
    outputs = np.zeros((kv_heads, dim, dim))
    for row in output.astype(np.float64).reshape(-1, q.shape[1], dim):
        for head, weights in enumerate(row):
            outputs[head // group] += np.outer(weights, weights) / group
    return LayerStatistics(key_variance, second, mean, variance, outputs)


def assert_close(measured: LayerStatistics, expected: LayerStatistics, rtol: float = 1e-4) -> None:
    """Probabilities are float32, of scores that are some ten times larger than their differences."""
    for name, values in vars(expected).items():
        one = getattr(measured, name)
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, values, rtol=rtol, atol=rtol * np.abs(values).max(), err_msg=name)


@in_turn("window", [None, 5, 21])
@pytest.mark.parametrize("shape", [(40, 2, 2, 8), (37, 6, 2, 4), (24, 3, 1, 6)])
def test_statistics_match_their_definitions(shape: Shape, window: int | None, rng: np.random.Generator) -> None:
    q, k = drawn(rng, shape)
    assert_close(measure(q, k, projection(q), 0.4, window, N, serial), reference(q, k, projection(q), 0.4, window))


@pytest.mark.parametrize(
    ("softcap", "sink_scores"), [(2.0, None), (None, [3.0, -1.0, 30.0, 1.0]), (2.0, [1.0, 2.0, 0.0, -9.0])]
)
def test_caps_and_sink_scores_take_part(
    softcap: float | None, sink_scores: list[float] | None, rng: np.random.Generator
) -> None:
    q, k = drawn(rng, (40, 4, 2, 8))
    options = {"softcap": softcap, "sink_scores": None if sink_scores is None else np.array(sink_scores, np.float32)}
    measured = measure(q, k, projection(q), 0.4, 21, N, serial, **options)
    assert_close(measured, reference(q, k, projection(q), 0.4, 21, **options))


def test_a_head_that_attends_only_to_the_first_block_weighs_all_queries_equally(rng: np.random.Generator) -> None:
    q = np.ones((24, 1, 4), np.float32) * rng.uniform(1, 2, (24, 1, 1)).astype(np.float32)
    k = np.zeros((1, 24, 4), np.float32)
    k[:, 0] = 1000
    statistics = measure(q, k, projection(q), 1.0, None, N, serial)
    np.testing.assert_allclose(statistics.query_mean[0], q[:, 0].mean(axis=0), rtol=1e-5)


def test_refuses_fewer_tokens_than_two_blocks(rng: np.random.Generator) -> None:
    q, k = drawn(rng, (2 * N - 1, 2, 2, 4))
    with pytest.raises(ValueError, match=f"fewer than two blocks of {N}"):
        measure(q, k, projection(q), 1.0, None, N, serial)


# -- smoothing ---------------------------------------------------------------------------------------------------------


def with_variances(keys: np.ndarray, queries: np.ndarray) -> LayerStatistics:
    plain = neutral(*keys.shape)
    return replace(plain, key_variance=keys, query_variance=queries)


VARIANCES = arrays(np.float32, (2, 8), elements=st.floats(2**-10, 2**10, width=32))


@given(keys=VARIANCES, queries=VARIANCES)
def test_smoothing_matches_its_formula_over_rope_pairs(keys: np.ndarray, queries: np.ndarray) -> None:
    s = smoothing(with_variances(keys, queries)).astype(np.float64)
    assert (s[:, :4] == s[:, 4:]).all()
    np.testing.assert_allclose(np.log(s).mean(axis=1), 0, atol=1e-6)
    sigma_k, sigma_q = (np.sqrt((v[:, :4].astype(np.float64) + v[:, 4:]) / 2) for v in (keys, queries))
    ratio = s[:, :4] / (sigma_k**0.75 / sigma_q**0.25)
    np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1], ratio.shape), rtol=1e-5)


def test_smoothing_of_constant_channels_is_finite() -> None:
    keys, queries = np.ones((3, 8), np.float32), np.ones((3, 8), np.float32)
    keys[0, [1, 5]] = 0
    queries[1, [2, 6]] = 0
    keys[2], queries[2] = 0, 0
    s = smoothing(with_variances(keys, queries))
    assert np.isfinite(s).all()
    assert (s > 0).all()
    assert s[0, 1] < s[0, 0]
    assert s[1, 2] > s[1, 0]
    np.testing.assert_array_equal(s[2], 1)
