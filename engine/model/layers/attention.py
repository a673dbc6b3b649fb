"""Attention over the K/V of a sequence: the projections of queries, keys and values, attention, and its output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.kv import AttentionRule, Cache, HeadRule, Norms, PreparedTransform
from polarlm.engine.backends.ops import Array, Fusion, Ops
from polarlm.engine.model.layers import Eps, LayerInputs, OutputProjection, Projection, Tap, norm_of, slot
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import config


@dataclass(frozen=True)
class AttentionWeights:
    """Matrices are (out, in); None for what the family does not have."""

    norm: Array | None = slot("attention_norm")  # (E,)
    qkv: Linear = slot("qkv", "linear")  # ((H + 2K)·D, E): q heads, k heads, v heads
    q_norm: Array | None = slot("q_norm")  # (D,), or (H·D,) of all heads together
    k_norm: Array | None = slot("k_norm")  # (D,), or (K·D,)
    sink_scores: Array | None = slot("sink_scores")  # (H,)
    out: Linear = slot("out", "linear")  # (E, H·D)
    # (E,): norms the result before it is added to the residual, or in encoders the sum
    post_norm: Array | None = slot("attention_post_norm")
    output_gate: Linear | None = slot("output_gate", "linear", default=None)  # (H·D, E), or (H, E)
    post_norm_bias: Array | None = slot("attention_post_norm_bias", default=None)  # (E,)


class Attention:
    """The mixer of one layer: see `engine.model.layers.kinds.Mixer`."""

    Weights = AttentionWeights

    def __init__(
        self,
        ops: Ops,
        shape: config.Attention,
        eps: Eps,
        weights: AttentionWeights,
        cache: Cache,
        transform: PreparedTransform,
    ):
        self.shape = shape
        self._ops, self._weights, self._cache, self._eps = ops, weights, cache, eps.before
        fusion, gate = Fusion(norm_of(weights.norm, eps.before)), weights.output_gate
        self._qkv = Projection(ops, weights.qkv, fusion)
        self._gate = None if gate is None else Projection(ops, gate, fusion)
        self._out = OutputProjection(ops, weights.out, norm_of(weights.post_norm, eps.after))
        rule = AttentionRule(shape.score_scale, shape.window, shape.softcap, weights.sink_scores, transform)
        # With adapters, what follows may read the result in float32.
        self._rule, self._float_rule = rule if gate is not None else rule._replace(consumer=weights.out), rule
        self._heads = HeadRule(transform, self._qk_norms())

    def _qk_norms(self) -> Norms:
        """The norms of each query and key; None if there are none, or if all heads are normed together."""
        w, shape = self._weights, self.shape
        if shape.qk_norm in ("unweighted", "after_rope"):  # RoPE keeps lengths: weights after it are in the transform
            ones = self._ops.to_device(np.ones(shape.head_dim, np.float32))
            return ones, ones, self._eps
        if w.q_norm is None or (shape.qk_norm == "all" and not shape.shares_kv):
            return None
        return w.q_norm, w.q_norm if shape.shares_kv else w.k_norm, self._eps

    def project(self, x: Array, inputs: LayerInputs, tap: Tap | None = None) -> Array:
        """Append the K/V of x (T, E) and return the queries (T, H, D), scaled and rotated as keys are."""
        ops, w, shape = self._ops, self._weights, self.shape
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        qkv = self._qkv(x, inputs.adapters)
        assert inputs.rope is not None
        cos, sin, *growth = inputs.rope
        if growth:  # before RoPE, which does not change lengths
            ops.scale(qkv[:, : heads * dim], growth[0])
        rope = cos, sin
        if shape.shares_kv:  # there are queries alone
            q, _, _ = ops.transform_heads(qkv.reshape(-1, heads, dim), rope, self._heads)
            return q
        if shape.qk_norm == "all":
            keys, values = heads * dim, (heads + kv_heads) * dim
            ops.rms_norm(qkv[:, :keys], (w.q_norm, self._eps))
            ops.rms_norm(qkv[:, keys:values], (w.k_norm, self._eps))
        qkv = qkv.reshape(-1, heads + 2 * kv_heads, dim)
        if tap is None:
            return ops.place_kv(qkv, rope, self._heads, self._cache, inputs.spans)
        q, k, v = ops.transform_heads(qkv, rope, self._heads)
        tap(q, k)
        ops.append_kv(self._cache, inputs.spans, k, v)
        return q

    def mix(self, x: Array, q: Array, inputs: LayerInputs) -> None:
        """Add the projected attention of queries q (T, H, D) to x (T, E), in place."""
        shape = self.shape
        rule = self._rule if inputs.adapters is None else self._float_rule
        mixed = self._ops.attention(q, self._cache, inputs.spans, rule)
        mixed = mixed.reshape(-1, shape.heads * shape.head_dim)
        if self._gate is not None:
            self._ops.gate(mixed, self._gate(x, inputs.adapters))
        self._out.add(x, mixed, inputs.adapters)
