"""What ops compute, in float64."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.kv import AttentionRule


def causal_mask(position: int, rows: int, tokens: int, window: int | None = None) -> np.ndarray:
    """Which of the tokens (S,) of a sequence its rows (T,) from `position` on see: bool (T, S)."""
    own, others = np.arange(position, position + rows)[:, None], np.arange(tokens)
    return (others <= own) & (others > own - (window or tokens))


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


def gated(exact: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[gate | up] and how far it may be off → silu(gate) · up, and how far that may be.

    The slope of silu is at most 1.1, and its size at most the gate's; it takes a few operations more.
    """
    (gate, up), (off_gate, off_up) = np.split(exact, 2, axis=1), np.split(allowed, 2, axis=1)
    silu = gate / (1 + np.exp(-gate))
    eps = np.finfo(np.float32).eps
    return silu * up, 1.1 * off_gate * (np.abs(up) + off_up) + np.abs(silu) * off_up + 16 * eps * np.abs(gate * up)
