"""What an error of a stored vector costs, and how that sum comes apart into one that can be made small step by step.

Letters: K KV heads, G query heads to each, E the model's width, N tokens in a block, D head dim, P = D / width codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.codecs import PathRounding, Rounding

_RIDGE = 0.05  # share of the mean diagonal that is added to it: statistics of 512 tokens are not to be taken literally
_KEY_SURVIVORS = 4  # keys cost a tenth less than with one, divergence is 5 % lower; values gain next to nothing
_PATH_TURNS = 4  # in so many turns the tokens of a block are rounded, where they are rounded as paths


@dataclass(frozen=True)
class Metric:
    """What an error costs, for each KV head, in the space that is stored (scaled and rotated). All float32."""

    matrix: np.ndarray  # (K, D, D) M: the error e of a vector costs e·M·eᵀ
    feedback: np.ndarray  # (K, D, D) strictly block-lower: row block j holds F_j
    weights: np.ndarray  # (K, P) what a square of e_j + F_j·e_{<j} costs, on average over its directions
    tilt_second: np.ndarray | None  # (K, D, D) E[qᵀq] of the queries that attend; keys only
    tilt_mean: np.ndarray | None  # (K, D) E[q] of the same
    survivors: int  # paths that a search keeps for each state: more where feedback is strong
    # (1 or K, T, N/T, N), values only: B, for tokens rounded in T turns, t, t + T, t + 2T and so on together. Rows are
    # those of turn t; columns all tokens, one turn after another.
    token_feedback: np.ndarray | None


def key_metric(
    query_second: np.ndarray,
    query_mean: np.ndarray,
    scale: np.ndarray,
    rotation: np.ndarray | None,
    rounding: Rounding | PathRounding,
) -> Metric:
    """Of keys stored as (k / scale) @ rotation, whose errors cost what they change in the products with queries.

    query_second (K, D, D), query_mean (K, D): E[qᵀq] and E[q], weighted by attention, before scale and rotation;
    scale (K, D); rotation (D, D), None for none; rounding: the codec's.
    """
    turn = np.eye(scale.shape[1]) if rotation is None else rotation.astype(np.float64)
    into = scale[:, :, None] * turn  # a query is stored as q @ into
    second = into.swapaxes(1, 2) @ query_second.astype(np.float64) @ into
    mean = (query_mean.astype(np.float64)[:, None] @ into)[:, 0]
    matrix = _ridged(second)
    feedback, weights = _decomposed(matrix, rounding.width)
    return Metric(
        matrix=_stored(matrix),
        feedback=feedback,
        weights=weights,
        tilt_second=_stored(second),
        tilt_mean=_stored(mean),
        survivors=_KEY_SURVIVORS,
        token_feedback=None,
    )


def value_metric(
    output: np.ndarray,
    kv_heads: int,
    head_dim: int,
    rotation: np.ndarray | None,
    rounding: Rounding | PathRounding,
    token_correlation: np.ndarray | None,
) -> Metric:
    """Of values stored as v @ rotation, whose errors cost what they change in the layer's output.

    output (E, H·D): the output projection; token_correlation (N,): E[p_t p_{t+lag}] of attention inside a block over
    its value at lag 0, None for tokens that are rounded on their own; rotation and rounding as in `key_metric`.
    """
    heads = output.reshape(len(output), kv_heads, -1, head_dim).transpose(1, 2, 0, 3).astype(np.float64)  # (K, G, E, D)
    second = (heads.swapaxes(2, 3) @ heads).mean(axis=1)
    if rotation is not None:
        second = rotation.T.astype(np.float64) @ second @ rotation
    matrix, tokens = _ridged(second), None
    if token_correlation is not None:
        size = len(token_correlation)
        turns = _PATH_TURNS if isinstance(rounding, PathRounding) else size
        order = np.arange(size).reshape(-1, turns).T.reshape(-1)
        lag = np.abs(np.subtract.outer(order, order))
        fed, _ = _decomposed(_ridged(token_correlation.astype(np.float64)[lag][None]), size // turns)
        tokens = fed.reshape(1, turns, -1, size)
    return Metric(_stored(matrix), *_decomposed(matrix, rounding.width), None, None, 1, tokens)


def together(metrics: Sequence[Metric | None]) -> Metric | None:
    """The metric of several layers' heads, one behind the other. All layers or none have one, all of them alike."""
    layers = [metric for metric in metrics if metric is not None]
    if len(layers) < 2:
        return metrics[0]

    def joined(parts: Iterable[np.ndarray | None]) -> np.ndarray | None:
        arrays = [part for part in parts if part is not None]
        return np.concatenate(arrays) if arrays else None

    def by_head(metric: Metric) -> np.ndarray | None:
        fed = metric.token_feedback
        return None if fed is None else np.broadcast_to(fed, (len(metric.matrix), *fed.shape[1:]))

    return Metric(
        matrix=np.concatenate([metric.matrix for metric in layers]),
        feedback=np.concatenate([metric.feedback for metric in layers]),
        weights=np.concatenate([metric.weights for metric in layers]),
        tilt_second=joined(metric.tilt_second for metric in layers),
        tilt_mean=joined(metric.tilt_mean for metric in layers),
        survivors=layers[0].survivors,
        token_feedback=joined(map(by_head, layers)),
    )


def without_feedback(metric: Metric) -> Metric:
    """The same, except that pairs are rounded as if their errors did not meet."""
    return replace(metric, feedback=np.zeros_like(metric.feedback), weights=np.ones_like(metric.weights), survivors=1)


def _ridged(second: np.ndarray) -> np.ndarray:
    """(K, D, D) → the same with a share of its mean diagonal added to the diagonal."""
    size = second.shape[-1]
    return second + _RIDGE * second.trace(axis1=1, axis2=2)[:, None, None] / size * np.eye(size)


def _stored(x: np.ndarray) -> np.ndarray:
    """As BLAS takes it without a copy."""
    return np.ascontiguousarray(x, np.float32)


def _decomposed(matrix: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Block LDL of matrix (K, D, D) float64, positive definite, from the last block backward.

    → F (K, D, D) float32; mean diagonal of every diagonal block (K, D / width) float32, on average 1.
    """
    rest, feedback = matrix.copy(), np.zeros_like(matrix)
    for start in range(matrix.shape[-1] - width, 0, -width):
        block = slice(start, start + width)
        feedback[:, block, :start] = np.linalg.solve(rest[:, block, block], rest[:, block, :start])
        rest[:, :start, :start] -= rest[:, :start, block] @ feedback[:, block, :start]
    diagonal = rest.diagonal(axis1=1, axis2=2)  # elimination leaves every diagonal block as it was in its turn
    weights = diagonal.reshape(len(diagonal), -1, width).mean(-1)
    return _stored(feedback), _stored(weights / weights.mean(-1, keepdims=True))
