"""A gated delta rule, token by token in float64: the reference of everything that computes it."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.delta import DeltaSlots, DeltaWeights
from polarlm.engine.state.delta import DeltaShape
from polarlm.model_loaders.config import GatedDelta


def make_weights(rng: np.random.Generator, shape: GatedDelta) -> DeltaWeights:
    """Random weights. Half of a matrix decays within one token to a few hundred."""
    heads = shape.value_heads
    of = DeltaWeights(
        conv=rng.standard_normal((shape.width, shape.channels)) / shape.width**0.5,
        decay=-np.geomspace(1, 0.003, heads),
        dt_bias=rng.standard_normal(heads),
        norm=1 + 0.2 * rng.standard_normal(shape.value_dim),
        eps=1e-6,
        tiled=shape.tiled,
    )
    return of._replace(**{name: np.asarray(value, np.float32) for name, value in zip(of._fields[:4], of, strict=False)})


def make_rows(rng: np.random.Generator, shape: GatedDelta, count: int) -> np.ndarray:
    """Random projected rows, float32 (count, C + H·D + 2H)."""
    columns = shape.channels + shape.value_heads * (shape.value_dim + 2)
    return rng.standard_normal((count, columns)).astype(np.float32)


def make_slots(shape: GatedDelta, count: int, block: int) -> DeltaSlots:
    """Slots of sequences without tokens. What is not read before it is written is NaN."""
    arrays = DeltaShape(shape).full_arrays(block)
    slots = DeltaSlots(*(np.full((count, *one.shape), np.nan, np.float32) for one in arrays))
    slots.matrices[:] = 0
    slots.inputs[:, : shape.width - 1] = 0
    return slots


def recurrence(
    rows: np.ndarray, w: DeltaWeights, shape: GatedDelta, start: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the results (T, H·D) of a sequence, and the matrices after each of its tokens (T, H, A, D).

    start: the matrices before the first token, and the inputs of the convolution (width − 1, C); None for zeros.
    """
    before = (0, np.zeros((shape.width - 1, shape.channels))) if start is None else start
    rows, (conv, decay, dt_bias, norm) = rows.astype(np.float64), (x.astype(np.float64) for x in w[:4])
    heads, key_heads, dim, key_dim = shape.value_heads, shape.key_heads, shape.value_dim, shape.key_dim
    padded = np.concatenate([before[1], rows[:, : shape.channels]])
    of_head = [head % key_heads if shape.tiled else head // (heads // key_heads) for head in range(heads)]
    matrix, results, matrices = before[0] + np.zeros((heads, key_dim, dim)), [], []
    for t, row in enumerate(rows):
        x = silu((conv * padded[t : t + shape.width]).sum(0))
        q, k, v = np.split(x, np.cumsum([key_heads * key_dim] * 2))
        q, k = (normed(part.reshape(key_heads, key_dim))[of_head] for part in (q, k))
        z, b, a = np.split(row[shape.channels :], np.cumsum([heads * dim, heads]))
        matrix = matrix * np.exp(decay * np.logaddexp(0, a + dt_bias))[:, None, None]
        beta = 1 / (1 + np.exp(-b))[:, None]
        update = beta * (v.reshape(heads, dim) - np.einsum("hkd,hk->hd", matrix, k))
        matrix = matrix + np.einsum("hk,hd->hkd", k, update)
        y = np.einsum("hkd,hk->hd", matrix, q) * key_dim**-0.5
        y *= norm / np.sqrt(np.square(y).mean(-1, keepdims=True) + w.eps)
        results.append((y * silu(z.reshape(heads, dim))).ravel())
        matrices.append(matrix)
    return np.array(results), np.array(matrices)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)
