"""What ops compute, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import AttentionRule


class Rounding(NamedTuple):
    """Functions that give the largest standard deviations of numbers that are rounded.

    channels: of queries and keys (…, D); values: of values (…, D); weights: of p (H, T, S), for values (H, S, D).
    """

    channels: Callable[[np.ndarray], np.ndarray]
    values: Callable[[np.ndarray], np.ndarray]
    weights: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _words_scale(x: np.ndarray) -> np.ndarray:
    """Of queries and keys: 46,320 is their norm, or less if a channel would exceed an int16."""
    norm, largest = np.linalg.norm(x, axis=-1, keepdims=True), np.abs(x).max(-1, keepdims=True)
    return np.maximum(norm / 46320, largest / 32767)


def _words_value_scale(v: np.ndarray) -> np.ndarray:
    """The power of two by which the largest channel is at most 16,383."""
    return 2.0 ** np.ceil(np.log2(np.abs(v).max(-1, keepdims=True) / 16383 + 2.0**-40))


def _words_weights(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Weights times scales of 64 tokens add up to 131,008, or less if one would exceed 32,760."""
    scales = _words_value_scale(v).swapaxes(1, 2)  # (H, 1, S)
    largest = (p * scales).max(-1, keepdims=True)
    total = np.minimum((p * scales).sum(-1, keepdims=True), 64 * largest)
    return np.maximum(total / 131008, largest / 32760) / scales / 12**0.5 + 1e-4 * p


BFLOAT = Rounding(  # by at most 2⁻⁸ of a number
    lambda x: 2.0**-8 / 6**0.5 * np.abs(x),
    lambda v: 2.0**-8 / 3**0.5 * np.abs(v),
    lambda p, v: 2.0**-8 / 3**0.5 * p,
)
WORDS = Rounding(
    lambda x: np.broadcast_to(_words_scale(x) / 12**0.5, x.shape),
    lambda v: np.broadcast_to(_words_value_scale(v) / 12**0.5, v.shape),
    _words_weights,
)


def causal_mask(position: int, rows: int, tokens: int, window: int | None = None, sees: int = 0) -> np.ndarray:
    """Which of the tokens (S,) of a sequence its rows (T,) from `position` on see: bool (T, S).

    sees: position up to which all rows see, if that is later than their own.
    """
    own, others = np.arange(position, position + rows)[:, None], np.arange(tokens)
    return (others <= np.maximum(own, sees)) & (others > own - (window or tokens))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    visible: np.ndarray,
    rule: AttentionRule,
    *,
    half_precision: bool = False,
) -> np.ndarray:
    """Attention of q (T, H, D) to those of k, v (S, K, D) that each row sees (T, S) → (T, H, D) float64.

    What no row sees may be NaN. half_precision: as kernels of a GPU round: q, k, v and the weights of tokens to half
    precision, everything else to float32.
    """
    group, log2_e = q.shape[1] // k.shape[1], np.log2(np.e)  # kernels compute powers of two
    ends = np.flatnonzero(visible.any(0))[[0, -1]]
    columns = slice(ends[0], ends[1] + 1)
    visible = visible[:, columns]
    k, v = (np.repeat(x[columns].astype(np.float64).swapaxes(0, 1), group, axis=0) for x in (k, v))
    q = (q.astype(np.float64) * rule.scale).swapaxes(0, 1)
    if half_precision:
        q, k, v = ((x * by).astype(np.float16).astype(np.float32) for x, by in ((q, log2_e), (k, 1), (v, 1)))
        q = q / np.float32(log2_e)
    scores = q @ k.swapaxes(1, 2)  # (H, T, S)
    if rule.softcap is not None:
        scores = rule.softcap * np.tanh(scores / rule.softcap)
    scores = np.where(visible, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    if rule.sink_scores is not None:
        sinks = rule.sink_scores[:, None, None].astype(np.float64)
        most = np.maximum(most, sinks)
    weights = np.exp2((scores - most) * log2_e)
    total = weights.sum(-1, keepdims=True)
    if rule.sink_scores is not None:
        total = total + np.exp2((sinks - most) * log2_e)
    if half_precision:
        weights = weights.astype(np.float16).astype(np.float32)
    return (weights @ v / total).swapaxes(0, 1).astype(np.float64)


def deviation(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, rule: AttentionRule, rounding: Rounding
) -> np.ndarray:
    """The largest standard deviation of `attention` with q, k, v and the weights rounded: (T, H, D).

    A result o = Σ p·v / Σ p changes by Σ p · (v − o) times the relative change of each weight, and by Σ p times the
    change of each value. Those are independent for each token, but for what the rounding of the query changes in all
    weights together: of that the largest sum is taken (Cauchy and Schwarz). A soft cap makes scores change less.
    """
    group, tokens = q.shape[1] // k.shape[1], len(k)
    identity = np.broadcast_to(np.eye(tokens)[:, None], (tokens, k.shape[1], tokens))
    k, v = (np.where(visible.any(0)[:, None, None], x, 0) for x in (k, v))
    p = attention(q, k, identity, visible, rule).swapaxes(0, 1)  # (H, T, S)
    o = attention(q, k, v, visible, rule).swapaxes(0, 1)
    keys, values = (np.repeat(x.astype(np.float64).swapaxes(0, 1), group, axis=0) for x in (k, v))
    queries = q.astype(np.float64).swapaxes(0, 1)
    of_keys, of_queries = (rounding.channels(x) ** 2 for x in (keys, queries))
    scores = rule.scale**2 * (queries**2 @ of_keys.swapaxes(1, 2) + of_queries @ (keys**2).swapaxes(1, 2))

    def spread(factors: np.ndarray) -> np.ndarray:
        """Σ factors · (v − o)²."""
        return factors @ values**2 - 2 * o * (factors @ values) + o**2 * factors.sum(-1, keepdims=True)

    of_weights = rounding.weights(p, values) ** 2
    variance = spread(p**2 * scores) + of_weights @ values**2 + (p * scores).sum(-1, keepdims=True) * spread(p)
    return np.sqrt(np.maximum(variance + p**2 @ rounding.values(values) ** 2, 0)).swapaxes(0, 1)


def gated(exact: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[gate | up] and how far it may be off → silu(gate) · up, and how far that may be.

    The slope of silu is at most 1.1, and its size at most the gate's; it takes a few operations more.
    """
    (gate, up), (off_gate, off_up) = np.split(exact, 2, axis=1), np.split(allowed, 2, axis=1)
    silu = gate / (1 + np.exp(-gate))
    eps = np.finfo(np.float32).eps
    return silu * up, 1.1 * off_gate * (np.abs(up) + off_up) + np.abs(silu) * off_up + 16 * eps * np.abs(gate * up)
