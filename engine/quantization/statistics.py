"""What one layer's queries and keys look like, which decides how its cache is smoothed and encoded.

Letters: T tokens, H query heads, K KV heads, G = H / K, D head dim, N block size. Queries and keys are those that
attention multiplies: after RoPE, before smoothing and rotation, the softmax scale not applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Keys take more of the smoothing than queries: by the square roots of both, KL is about 15 % larger.
_KEY_EXPONENT = 0.75
_QUERY_EXPONENT = 0.25

# A channel that hardly moves is smoothed as if it had this share of its head's mean variance.
_LEAST_VARIANCE = 1e-8


@dataclass(frozen=True)
class LayerStatistics:
    """All arrays float32. An attention weight is w_i = Σ_t p_it (1 − p_it) over the keys t behind the first block:
    how much the attention of query i answers to errors of keys. Query statistics of a KV head are means over the
    query heads that read it.
    """

    key_variance: np.ndarray  # (K, D) of keys around the mean of their block, first block left out
    query_second: np.ndarray  # (K, D, D) E[qᵀq], weighted by attention
    query_mean: np.ndarray  # (K, D) E[q], weighted alike
    query_variance: np.ndarray  # (K, D) E[q²], all queries alike
    token_correlation: np.ndarray  # (N,) E[p_t p_{t+lag}] inside blocks, over its value at lag 0; mean over heads


def neutral(kv_heads: int, head_dim: int, block_size: int) -> LayerStatistics:
    """What is assumed of a layer that nothing is known of: every channel alike, every token on its own."""
    ones = np.ones((kv_heads, head_dim), np.float32)
    return LayerStatistics(
        key_variance=ones,
        query_second=np.broadcast_to(np.eye(head_dim, dtype=np.float32), (kv_heads, head_dim, head_dim)),
        query_mean=np.zeros_like(ones),
        query_variance=ones,
        token_correlation=_by_lag(np.eye(block_size)),
    )


class Head(NamedTuple):
    """What one query head contributes, float64."""

    second: np.ndarray  # (D, D) Σ w qᵀq / Σ w
    mean: np.ndarray  # (D,) Σ w q / Σ w
    token_products: np.ndarray  # (N, N) Σ p_t p_t′ over queries and over blocks but the first


def measure(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    window: int | None,
    block_size: int,
    each: Callable[[Callable[[int], Head], int], list[Head]],
) -> LayerStatistics:
    """Statistics of q (T, H, D) and k (K, T, D) float32 under causal attention, in a sliding window where there is one.

    `each(work, count)` is [work(0), …, work(count − 1)], as of the ops. Probabilities are float32, O(T²) memory for
    each head in work; sums over tokens are float64. Only whole blocks count where blocks are meant. FLOPs:
    O(H·T²·(D + N)). Raises ValueError on fewer tokens than two blocks have.
    """
    kv_heads, count, dim = k.shape
    heads = q.shape[1]
    if count < 2 * block_size:
        raise ValueError(f"{count} tokens are fewer than two blocks of {block_size}.")
    hidden, group = _hidden(count, window), heads // kv_heads
    measured = each(lambda h: _measure_head(q[:, h], k[h // group], scale, hidden, block_size), heads)
    by_kv_head = [measured[first : first + group] for first in range(0, heads, group)]
    q_squares = np.square(q, dtype=np.float64).reshape(count, kv_heads, group, dim)
    return LayerStatistics(
        key_variance=_block_variance(k, block_size).astype(np.float32),
        query_second=np.array([np.mean([head.second for head in one], axis=0) for one in by_kv_head], np.float32),
        query_mean=np.array([np.mean([head.mean for head in one], axis=0) for one in by_kv_head], np.float32),
        query_variance=q_squares.mean(axis=(0, 2)).astype(np.float32),
        token_correlation=_by_lag(np.sum([head.token_products for head in measured], axis=0)),
    )


def smoothing(statistics: LayerStatistics) -> np.ndarray:
    """s (K, D) float32: keys are stored as k / s and asked with s ∘ q, which changes no product.

    s = σ_k^¾ / σ_q^¼, equal for the two channels of a RoPE pair (j, j + D/2); geometric mean 1 for each head.
    """
    s = _pair_variance(statistics.key_variance) ** (_KEY_EXPONENT / 2)
    s /= _pair_variance(statistics.query_variance) ** (_QUERY_EXPONENT / 2)
    return (s / np.exp(np.log(s).mean(axis=-1, keepdims=True))).astype(np.float32)


def _pair_variance(variance: np.ndarray) -> np.ndarray:
    """(K, D) → (K, D) float64, positive: the mean over the two channels of each RoPE pair."""
    halves = variance.astype(np.float64).reshape(len(variance), 2, -1)
    pairs = np.tile(halves.mean(axis=1), 2)
    mean = pairs.mean(axis=-1, keepdims=True)
    return np.maximum(pairs, np.where(mean > 0, _LEAST_VARIANCE * mean, 1))


def _measure_head(q: np.ndarray, k: np.ndarray, scale: float, hidden: np.ndarray, block_size: int) -> Head:
    """q, k (T, D) float32, hidden (T, T) bool."""
    p = (q * np.float32(scale)) @ k.T
    np.copyto(p, -np.inf, where=hidden)
    p -= p.max(axis=1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=1, keepdims=True)
    p[:, :block_size] = 0  # the first block is exact: no error enters through it

    weights = np.einsum("it,it->i", p, 1 - p).astype(np.float64)
    total = weights.sum()
    if total == 0:  # a head that attends to the first block alone
        weights[:] = 1
        total = len(weights)
    q = q.astype(np.float64)
    weighted = q * (weights / total)[:, None]

    products = np.zeros((block_size, block_size))
    for first in range(block_size, len(p) // block_size * block_size, block_size):
        block = p[first:, first : first + block_size]  # rows before it do not see it
        products += block.T @ block
    return Head(weighted.T @ q, weighted.sum(axis=0), products)


def _hidden(count: int, window: int | None) -> np.ndarray:
    """(T, T) bool: which keys (columns) a query (row) does not see."""
    behind = np.arange(count)[:, None] - np.arange(count)
    return behind < 0 if window is None else (behind < 0) | (behind >= window)


def _block_variance(k: np.ndarray, block_size: int) -> np.ndarray:
    """k (K, T, D) → (K, D) float64: mean square around the mean of each whole block but the first."""
    kv_heads, count, dim = k.shape
    whole = k[:, block_size : count // block_size * block_size]
    blocks = whole.astype(np.float64).reshape(kv_heads, -1, block_size, dim)
    return blocks.var(axis=2).mean(axis=1)


def _by_lag(products: np.ndarray) -> np.ndarray:
    """(N, N) → (N,) float32: the mean of each diagonal, from the main one up, over that of the main one.

    Where few tokens have all the attention, such means need not be the correlation of anything: then all lags but 0
    shrink until the Toeplitz matrix of the result has no negative eigenvalue.
    """
    lags = np.arange(len(products))
    means = np.array([np.diagonal(products, lag).mean() for lag in lags])
    if means[0] == 0:  # nothing behind the first block is attended to
        means[0] = 1
    means /= means[0]
    least = np.linalg.eigvalsh(means[np.abs(lags[:, None] - lags)])[0]
    if least < 0:
        means[1:] /= 1 - least
    return means.astype(np.float32)
