"""Latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1): all heads attend to one key and one value a token.

A token's latent vector c (L,) stands for the keys and values of all heads: those of head h are Kₕ·c and Vₕ·c. Since
q·(Kₕ·c) = (Kₕᵀ·q)·c, queries are multiplied by Kₕᵀ, and attention's results, sums of latent vectors, by Vₕ, so that c
alone is stored. A few channels that RoPE rotates, the same for all heads, are stored with it, as part of the key.

A head's own keys and values have fewer channels than c, so that a long prompt's rows attend to these, which are made
anew for each chunk of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.kv import AttentionRule, Cache, HeadRule, PreparedTransform
from polarlm.engine.backends.ops import Array, Expansion, Fusion, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, OutputProjection, Projection, Tap, norm_of, slot
from polarlm.engine.weight_formats import ExpertLinear, Linear
from polarlm.model_loaders import config

_TILE_ROWS = 16  # of a head's matrices, which are then read as one: see `Expansion`
_LATENT_EPS = 1e-6  # of the norms of latent vectors, as in DeepSeek's own code


@dataclass(frozen=True)
class LatentAttentionWeights:
    """Matrices are (out, in); None for what the family does not have. C: channels of a query, its own and rotated ones.
    D: L and the rotated ones."""

    norm: Array | None = slot("attention_norm")  # (E,)
    q_up: Linear = slot("q_up", "linear")  # (H·C, E), or of the queries' latent vector
    kv_down: Linear = slot("kv_down", "linear")  # (D, E): the latent vector, then the rotated channels
    kv_norm: Array = slot("kv_norm")  # (L,)
    keys: ExpertLinear = slot("latent_keys", "heads")  # (L, own channels) of each head
    values: ExpertLinear = slot("latent_values", "heads")  # (value channels, L) of each head
    key_rows: Linear | None = slot("latent_key_rows", "rows_of_heads")  # (H · own channels, L): `keys`, transposed
    out: Linear = slot("out", "linear")  # (E, H · value channels)
    q_down: Linear | None = slot("q_down", "linear", default=None)
    q_norm: Array | None = slot("q_latent_norm", default=None)
    post_norm: Array | None = slot("attention_post_norm", default=None)


class LatentAttention:
    """The mixer of one layer: see `engine.model.layers.kinds.Mixer`."""

    Weights = LatentAttentionWeights

    def __init__(
        self,
        ops: Ops,
        shape: config.LatentAttention,
        eps: Eps,
        weights: LatentAttentionWeights,
        cache: Cache,
        transform: PreparedTransform,
    ):
        assert ops.latent_ops is not None
        self.shape, self._latent_ops = shape, ops.latent_ops
        self._ops, self._weights, self._cache = ops, weights, cache
        norm = Fusion(norm_of(weights.norm, eps.before))
        self._q_down = None if weights.q_down is None else Projection(ops, weights.q_down, norm)
        self._q_up = Projection(
            ops, weights.q_up, Fusion(norm_of(weights.q_norm, _LATENT_EPS)) if self._q_down else norm
        )
        self._kv_down = Projection(ops, weights.kv_down, norm)
        self._out = OutputProjection(ops, weights.out, norm_of(weights.post_norm, eps.after))
        self._rule = AttentionRule(shape.score_scale, transform=transform)
        self._head_rule = HeadRule(transform)
        self._columns = shape.rotated + max(shape.own_dim, shape.value_dim)  # of a head's keys and values
        is_whole = shape.own_dim % 2 == 0 and shape.value_dim % _TILE_ROWS == 0
        self._expansion_ops, self._expansion = ops.latent_ops.expansion_ops, None
        if weights.key_rows is not None and is_whole and self._columns < shape.head_dim:
            self._expansion = Expansion(weights.key_rows, Linear(weights.values.parts))

    def project(self, x: Array, inputs: LayerInputs, tap: Tap | None = None) -> Array:
        """Append the latent vectors of x (T, E) and return the queries (T, H, D), scaled and rotated as keys are; or
        those of `LatentOps.join_queries`, if rows attend to keys of each head."""
        ops, latent_ops, shape = self._ops, self._latent_ops, self.shape
        latent, rotated = shape.latent, shape.rotated
        below = x if self._q_down is None else self._q_down(x, inputs.adapters)
        q = self._q_up(below, inputs.adapters).reshape(-1, shape.own_dim + rotated)  # (T·H, C)
        own, rotary = q[:, : shape.own_dim], q[:, shape.own_dim :]
        kv = self._kv_down(x, inputs.adapters)
        ops.rms_norm(kv[:, :latent], (self._weights.kv_norm, _LATENT_EPS))
        assert inputs.rope is not None
        cos, sin, *_ = inputs.rope
        expansion_ops = None if self._expansion is None or tap is not None else self._expansion_ops
        if expansion_ops is not None and expansion_ops.expands(self._cache, inputs.spans):
            key = latent_ops.join_latents(own[:0], rotary[:0], kv)  # there are no queries
            ops.place_kv(key, (cos, sin), self._head_rule, self._cache, inputs.spans)
            return expansion_ops.join_queries(own, rotary, (cos, sin), self._columns)
        absorbed = latent_ops.multiply_heads(own, self._weights.keys)  # (T·H, L)
        qk = latent_ops.join_latents(absorbed, rotary, kv)
        if tap is None:
            return ops.place_kv(qk, (cos, sin), self._head_rule, self._cache, inputs.spans)
        q, k, v = ops.transform_heads(qk, (cos, sin), self._head_rule)
        tap(q, k)
        ops.append_kv(self._cache, inputs.spans, k, v)
        return q

    def mix(self, x: Array, q: Array, inputs: LayerInputs) -> None:
        """Add the projected attention of queries q (T, H, D) to x (T, E), in place."""
        shape, latent_ops = self.shape, self._latent_ops
        if self._expansion is not None and self._expansion_ops is not None and q.shape[2] < shape.head_dim:
            values = self._expansion_ops.attend_by_heads(q, self._cache, inputs.spans, self._rule, self._expansion)
        else:
            latents = latent_ops.take_latents(
                self._ops.attention(q, self._cache, inputs.spans, self._rule), shape.latent
            )
            values = latent_ops.multiply_heads(latents, self._weights.values)
        self._out.add(x, values.reshape(-1, shape.heads * shape.value_dim), inputs.adapters)


def variances(ops: Ops, w: LatentAttentionWeights, inputs: np.ndarray) -> np.ndarray:
    """Expected squares of a layer's keys, (1, D) float64. inputs (E,): mean squares of the normed input."""
    latent = np.square(ops.to_host(w.kv_norm), dtype=np.float64)
    rotated = np.square(ops.rows(w.kv_down, slice(len(latent), None)), dtype=np.float64) @ inputs
    halves = zip(np.split(rotated, 2), np.split(latent, 2), strict=True)
    return np.concatenate([part for half in halves for part in half])[None]


def latent_output(ops: Ops, w: LatentAttentionWeights, output: np.ndarray) -> np.ndarray:
    """The output projection after the heads' matrices of values, in fewer rows: (n, H·D) float32, whose products have
    the same lengths. output (E, H · value channels) float32."""
    (value_dim, latent), heads, dim = w.values.shape, w.values.count, w.kv_down.shape[0]
    values = ops.rows(w.values.parts[0]).reshape(heads, value_dim, latent)
    triangles: np.ndarray = np.linalg.qr(output.reshape(len(output), heads, value_dim).swapaxes(0, 1), mode="r")  # type: ignore[assignment]
    whole = np.zeros((triangles.shape[1], heads, 2, dim // 2), np.float32)
    whole[..., -(latent // 2) :] = (triangles @ values).reshape(heads, -1, 2, latent // 2).swapaxes(0, 1)
    return whole.reshape(len(whole), -1)
