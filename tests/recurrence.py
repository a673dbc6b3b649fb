"""Recurrent layers, token by token in float64: the reference of everything that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polarlm.engine.backends.delta import DeltaSlots, DeltaWeights, Mamba2Weights
from polarlm.engine.state.recurrent.delta import DeltaShape
from polarlm.model_loaders.config import ChannelDelta, Mamba2, Recurrent

Weights = DeltaWeights | Mamba2Weights


def make_weights(rng: np.random.Generator, shape: Recurrent) -> Weights:
    """Random weights. Half of a matrix decays within one token to a few hundred."""
    heads, inner = shape.value_heads, shape.value_heads * shape.value_dim
    conv = rng.standard_normal((shape.width, shape.channels)) / shape.width**0.5
    decay = -np.geomspace(1, 0.003, heads)
    dt_bias = rng.standard_normal(heads * (shape.key_dim if isinstance(shape, ChannelDelta) else 1))
    if isinstance(shape, Mamba2):
        bias = 0.5 * rng.standard_normal(shape.channels) if shape.conv_bias else None
        skip, norm = rng.standard_normal(heads), 1 + 0.2 * rng.standard_normal(inner)
        of: Weights = Mamba2Weights(conv, bias, decay, dt_bias, skip, norm, shape.norm_eps)
    else:
        norm = 1 + 0.2 * rng.standard_normal(shape.value_dim)
        of = DeltaWeights(conv, decay, dt_bias, norm, 1e-6, shape.tiled)
    return of._replace(
        **{name: array.astype(np.float32) for name, array in of._asdict().items() if isinstance(array, np.ndarray)}
    )


def make_rows(rng: np.random.Generator, shape: Recurrent, count: int) -> np.ndarray:
    """Random projected rows, float32 (count, columns). Of a `ChannelDelta`, decays and gates follow."""
    if isinstance(shape, ChannelDelta):
        columns = shape.channels + shape.value_heads * (1 + shape.key_dim + shape.value_dim)
        return rng.standard_normal((count, columns)).astype(np.float32)
    more = shape.value_dim + (1 if isinstance(shape, Mamba2) else 2)
    return rng.standard_normal((count, shape.channels + shape.value_heads * more)).astype(np.float32)


def op_of(ops: Any, shape: Recurrent) -> Callable[..., Any]:
    """The op that adds rows to a layer's state."""
    return getattr(ops, {Mamba2: "mamba2", ChannelDelta: "channel_delta"}.get(type(shape), "gated_delta"))


def op_rows(rows: np.ndarray, shape: Recurrent) -> list[np.ndarray]:
    """Rows as the op takes them: projected ones, and of a `ChannelDelta` also decays and gates."""
    if not isinstance(shape, ChannelDelta):
        return [rows]
    columns = np.cumsum([shape.channels + shape.value_heads, shape.value_heads * shape.key_dim])
    return [np.ascontiguousarray(part) for part in np.split(rows, columns, axis=1)]


def conv_inputs(rows: np.ndarray, shape: Recurrent) -> np.ndarray:
    """The columns of projected rows that are convolved, (count, C)."""
    first = shape.value_heads * shape.value_dim if isinstance(shape, Mamba2) else 0
    return rows[:, first : first + shape.channels]


def make_slots(shape: Recurrent, count: int, block: int) -> DeltaSlots:
    """Slots of sequences without tokens. What is not read before it is written is NaN."""
    arrays = DeltaShape(shape).full_arrays(block)
    slots = DeltaSlots(*(np.full((count, *one.shape), np.nan, np.float32) for one in arrays))
    slots.matrices[:] = 0
    slots.inputs[:, : shape.width - 1] = 0
    return slots


def recurrence(
    rows: np.ndarray, w: Weights, shape: Recurrent, start: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results (T, H·D) of a sequence, and the matrices after each of its tokens (T, H, A, D).

    start: the matrices before the first token, and the inputs of the convolution (width − 1, C); None for zeros.
    """
    matrix, before = (
        start
        if start is not None
        else (
            np.zeros((shape.value_heads, shape.key_dim, shape.value_dim)),
            np.zeros((shape.width - 1, shape.channels)),
        )
    )
    rows = rows.astype(np.float64)
    w = w._replace(**{name: x.astype(np.float64) for name, x in w._asdict().items() if isinstance(x, np.ndarray)})
    padded = np.concatenate([before, conv_inputs(rows, shape)])
    token = {Mamba2: _mamba2, ChannelDelta: _channel_delta}.get(type(shape), _gated_delta)
    results, matrices = [], []
    for t, row in enumerate(rows):
        x = (w.conv * padded[t : t + shape.width]).sum(0)
        result, matrix = token(x, row, w, shape, matrix)
        results.append(result)
        matrices.append(matrix)
    return np.array(results), np.array(matrices)


def _gated_delta(
    x: np.ndarray, row: np.ndarray, w: DeltaWeights, shape: Recurrent, matrix: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token's result and the matrices after it. x: sums of the convolution."""
    heads, key_heads, dim, key_dim = shape.value_heads, shape.key_heads, shape.value_dim, shape.key_dim
    of_head = [head % key_heads if shape.tiled else head // (heads // key_heads) for head in range(heads)]
    q, k, v = np.split(silu(x), np.cumsum([key_heads * key_dim] * 2))
    q, k = (normed(part.reshape(key_heads, key_dim))[of_head] for part in (q, k))
    z, b, a = np.split(row[shape.channels :], np.cumsum([heads * dim, heads]))
    matrix = matrix * np.exp(w.decay * np.logaddexp(0, a + w.dt_bias))[:, None, None]
    beta = 1 / (1 + np.exp(-b))[:, None]
    update = beta * (v.reshape(heads, dim) - np.einsum("hkd,hk->hd", matrix, k))
    matrix = matrix + np.einsum("hk,hd->hkd", k, update)
    y = np.einsum("hkd,hk->hd", matrix, q) * key_dim**-0.5
    y *= w.norm / np.sqrt(np.square(y).mean(-1, keepdims=True) + w.eps)
    return (y * silu(z.reshape(heads, dim))).ravel(), matrix


def _channel_delta(
    x: np.ndarray, row: np.ndarray, w: DeltaWeights, shape: Recurrent, matrix: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As `_gated_delta`: (I − β k kᵀ) Diag(α) S + β k vᵀ, as Kimi Linear has it (arXiv:2510.26692, §3)."""
    heads, key_dim = shape.value_heads, shape.key_dim
    q, k, v = (part.reshape(heads, -1) for part in np.split(silu(x), np.cumsum([heads * key_dim] * 2)))
    q, k = normed(q), normed(k)
    b, decay, gate = np.split(row[shape.channels :], np.cumsum([heads, heads * key_dim]))
    alpha = np.exp(w.decay[:, None] * np.logaddexp(0, decay + w.dt_bias).reshape(heads, key_dim))
    beta = 1 / (1 + np.exp(-b))[:, None, None]
    matrix = alpha[..., None] * matrix
    matrix = (np.eye(key_dim) - beta * k[:, :, None] * k[:, None]) @ matrix + beta * k[:, :, None] * v[:, None]
    y = np.einsum("hkd,hk->hd", matrix, q) * key_dim**-0.5
    y *= w.norm / np.sqrt(np.square(y).mean(-1, keepdims=True) + w.eps)
    return y.ravel() / (1 + np.exp(-gate)), matrix


def _mamba2(
    x: np.ndarray, row: np.ndarray, w: Mamba2Weights, shape: Recurrent, matrix: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As `_gated_delta`."""
    heads, groups, dim, size = shape.value_heads, shape.key_heads, shape.value_dim, shape.key_dim
    x, b, c = np.split(silu(x if w.bias is None else x + w.bias), np.cumsum([heads * dim, groups * size]))
    x = x.reshape(heads, dim)
    b, c = (part.reshape(groups, size).repeat(heads // groups, axis=0) for part in (b, c))
    step = np.logaddexp(0, row[-heads:] + w.dt_bias)[:, None]
    matrix = matrix * np.exp(w.decay[:, None] * step)[..., None] + np.einsum("hk,hd->hkd", b, step * x)
    y = np.einsum("hkd,hk->hd", matrix, c) + w.skip[:, None] * x
    parts = (y.ravel() * silu(row[: heads * dim])).reshape(groups, -1)
    parts /= np.sqrt(np.square(parts).mean(-1, keepdims=True) + w.eps)
    return parts.ravel() * w.norm, matrix


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)
