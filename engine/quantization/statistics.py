"""Statistics of one layer, from which its smoothing and its error metrics are computed.

Letters: T tokens, H query heads, K KV heads, G = H / K, D head dim, N block size. Queries and keys are taken after
RoPE, before smoothing and rotation, without the softmax scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Keys have the larger exponent: with the square roots of both, KL divergence is about 15 % larger.
_KEY_EXPONENT = 0.75
_QUERY_EXPONENT = 0.25

# The least variance of a channel in smoothing, as a share of its head's mean variance.
_LEAST_VARIANCE = 1e-8


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer. All arrays are float32.

    "Weighted by attention" gives query i the weight w_i = Σ_t p_it (1 − p_it) over the keys t after the first block:
    the sensitivity of its attention to errors of keys. Query statistics of a KV head are means over the query heads
    that read it.
    """

    key_variance: np.ndarray  # (K, D) of keys around the mean of their block, without the first block
    query_second: np.ndarray  # (K, D, D) E[qᵀq], weighted by attention
    query_mean: np.ndarray  # (K, D) E[q], weighted by attention
    query_variance: np.ndarray  # (K, D) E[q²], unweighted
    output_second: np.ndarray  # (K, D, D) see `output_second`


def neutral(kv_heads: int, head_dim: int) -> LayerStatistics:
    """Return statistics without calibration: channels have variance 1 and are uncorrelated."""
    ones = np.ones((kv_heads, head_dim), np.float32)
    identity = np.broadcast_to(np.eye(head_dim, dtype=np.float32), (kv_heads, head_dim, head_dim))
    return LayerStatistics(
        key_variance=ones,
        query_second=identity,
        query_mean=np.zeros_like(ones),
        query_variance=ones,
        output_second=identity,
    )


class HeadStatistics(NamedTuple):
    """Statistics of one query head, float64."""

    second: np.ndarray  # (D, D) Σ w qᵀq / Σ w
    mean: np.ndarray  # (D,) Σ w q / Σ w


def measure(
    q: np.ndarray,
    k: np.ndarray,
    output: np.ndarray,
    scale: float,
    window: int | None,
    block_size: int,
    parallel_map: Callable[[Callable[[int], HeadStatistics], int], list[HeadStatistics]],
    *,
    softcap: float | None = None,
    sink_scores: np.ndarray | None = None,
) -> LayerStatistics:
    """Return statistics of q (T, H, D) and k (K, T, D) float32 under causal attention, in a sliding window if given.

    output (E, H·D) float32: the output projection. softcap, sink_scores (H,) float32: as in attention. The slope of a
    cap does not count in the sensitivity: it is near 1 but for scores about as large as the cap.

    parallel_map(work, count): returns [work(0), …, work(count − 1)], possibly by threads. Statistics of blocks
    skip an incomplete last block. Attention is float32 and takes O(T²) memory for each head at a time; sums over tokens
    are float64. FLOPs: O(H·T²·D). Raises ValueError for fewer tokens than two blocks have.
    """
    kv_heads, count, dim = k.shape
    heads = q.shape[1]
    if count < 2 * block_size:
        raise ValueError(f"{count} tokens are fewer than two blocks of {block_size}.")
    hidden, group = _hidden_keys(count, window), heads // kv_heads
    sinks = [None] * heads if sink_scores is None else list(sink_scores)
    measured = parallel_map(
        lambda h: _measure_head(q[:, h], k[h // group], scale, softcap, sinks[h], hidden, block_size), heads
    )
    by_kv_head = [measured[first : first + group] for first in range(0, heads, group)]
    q_squares = np.square(q, dtype=np.float64).reshape(count, kv_heads, group, dim)
    return LayerStatistics(
        key_variance=_block_variance(k, block_size).astype(np.float32),
        query_second=np.array([np.mean([head.second for head in one], axis=0) for one in by_kv_head], np.float32),
        query_mean=np.array([np.mean([head.mean for head in one], axis=0) for one in by_kv_head], np.float32),
        query_variance=q_squares.mean(axis=(0, 2)).astype(np.float32),
        output_second=output_second(output, kv_heads, dim),
    )


def output_second(output: np.ndarray, kv_heads: int, head_dim: int) -> np.ndarray:
    """Return (K, D, D) float32: for each KV head, the mean of WᵀW over its query heads, whose columns of the output
    projection are W (E, D). An error e of a value, times its attention, changes the output by a square of e·WᵀW·eᵀ.

    output (E, H·D) float32.
    """
    heads = output.reshape(len(output), kv_heads, -1, head_dim).transpose(1, 2, 0, 3)  # (K, G, E, D)
    second = np.empty((kv_heads, head_dim, head_dim), np.float32)
    for place, group in zip(second, heads, strict=True):  # a KV head at a time: float64 takes twice the memory
        wide = group.astype(np.float64)
        place[...] = (wide.swapaxes(1, 2) @ wide).mean(axis=0)
    return second


def smoothing(statistics: LayerStatistics) -> np.ndarray:
    """Return s (K, D) float32, by which keys are divided and queries multiplied: σ_k^¾ / σ_q^¼, equal for the two
    channels of a RoPE pair (j, j + D/2); geometric mean 1 for each head."""
    s = _pair_variance(statistics.key_variance) ** (_KEY_EXPONENT / 2)
    s /= _pair_variance(statistics.query_variance) ** (_QUERY_EXPONENT / 2)
    return (s / np.exp(np.log(s).mean(axis=-1, keepdims=True))).astype(np.float32)


def _pair_variance(variance: np.ndarray) -> np.ndarray:
    """Return the mean over the two channels of each RoPE pair: variance (K, D) → (K, D) float64, positive."""
    halves = variance.astype(np.float64).reshape(len(variance), 2, -1)
    pairs = np.tile(halves.mean(axis=1), 2)
    mean = pairs.mean(axis=-1, keepdims=True)
    return np.maximum(pairs, np.where(mean > 0, _LEAST_VARIANCE * mean, 1))


@np.errstate(invalid="ignore", over="ignore")  # it runs in other threads, which do not inherit the caller's errstate
def _measure_head(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    softcap: float | None,
    sink: np.float32 | None,
    hidden: np.ndarray,
    block_size: int,
) -> HeadStatistics:
    """Return statistics of one head: q, k (T, D) float32, hidden (T, T) bool."""
    p = (q * np.float32(scale)) @ k.T
    if softcap is not None:
        p = np.float32(softcap) * np.tanh(p / np.float32(softcap))
    np.copyto(p, -np.inf, where=hidden)
    top = p.max(axis=1, keepdims=True)
    top = top if sink is None else np.maximum(top, sink)
    p -= top
    np.exp(p, out=p)
    p /= p.sum(axis=1, keepdims=True) + (0 if sink is None else np.exp(sink - top))
    p[:, :block_size] = 0  # the first block stays in full precision: its keys have no errors

    weights = np.einsum("it,it->i", p, 1 - p).astype(np.float64)
    total = weights.sum()
    if total == 0:  # a head that attends only to the first block
        weights[:] = 1
        total = len(weights)
    q = q.astype(np.float64)
    weighted = q * (weights / total)[:, None]
    return HeadStatistics(weighted.T @ q, weighted.sum(axis=0))


def _hidden_keys(count: int, window: int | None) -> np.ndarray:
    """Return (T, T) bool: True where a query (row) does not attend to a key (column)."""
    distance = np.arange(count)[:, None] - np.arange(count)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def _block_variance(k: np.ndarray, block_size: int) -> np.ndarray:
    """Return the mean square of k (K, T, D) around the mean of each complete block but the first: (K, D) float64."""
    kv_heads, count, dim = k.shape
    whole = k[:, block_size : count // block_size * block_size]
    blocks = whole.astype(np.float64).reshape(kv_heads, -1, block_size, dim)
    return blocks.var(axis=2).mean(axis=1)
