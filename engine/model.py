"""The Llama-family forward pass, written once over the op set.

Letters: T rows, E hidden size, F feed-forward size, H query heads, K KV heads, D head dim, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.backends.ops import Array, CacheSpan, Ops
from engine.kv.store import KVStore, Span
from model_loaders.config import ModelConfig
from model_loaders.rope import rope_frequencies

# Rows of a prompt that go through a layer at once. Large enough for the matrix products, small enough that the
# feed-forward activations stay near the cache.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are (out, in); None where the family has no such term."""

    attention_norm: Array  # (E,)
    qkv: Array  # ((H + 2K)·D, E): q heads, k heads, v heads
    qkv_bias: Array | None
    q_norm: Array | None  # (D,)
    k_norm: Array | None
    out: Array  # (E, H·D)
    out_bias: Array | None
    ffn_norm: Array  # (E,)
    gate_up: Array  # (2F, E)
    gate_up_bias: Array | None
    down: Array  # (E, F)
    down_bias: Array | None


@dataclass(frozen=True)
class ModelWeights:
    """All weights on the device."""

    embedding: Array  # (V, E)
    layers: Sequence[LayerWeights]
    norm: Array  # (E,)
    head: Array  # (V, E); the embedding itself where they are tied
    bytes: int


class Model:
    """Token ids in, logits out; K/V go to the store on the way."""

    def __init__(self, ops: Ops, config: ModelConfig, weights: ModelWeights, store: KVStore):
        self.ops = ops
        self.config = config
        self.weights = weights
        self.store = store
        self._frequencies, self._rope_factor = rope_frequencies(config.rope, config.head_dim)
        self._scale = config.head_dim**-0.5
        self._balances = [stored.scales(config.heads) for stored in store.conditioning]

    def walk(
        self, spans: Sequence[Span], ids: Sequence[int], outputs: int | None = None
    ) -> Generator[int, None, Array]:
        """Take the new tokens `ids` of `spans`, in order, through all layers, and their K/V into the store.

        A generator, so that other work can stand between its units: it yields the rows done after each unit (one
        layer of at most PREFILL_CHUNK rows) and returns the hidden states of the last `outputs` rows (all for None),
        (outputs, E). All layers are sealed then; commit is the caller's. Several spans must be steps (one token each).
        Cost per token: 2 FLOPs per weight, and attention that grows with the tokens before it; memory: T·E for the
        prompt, and one layer's K/V.
        """
        count = len(ids)
        first_output = 0 if outputs is None else count - outputs
        x = self.ops.embed(self.weights.embedding, ids)
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in spans])
        turns = self._turns(positions)
        for layer in range(self.config.layers):
            # Behind the last layer's K/V nobody reads the other rows any more.
            wanted = first_output if layer == self.config.layers - 1 else 0
            for span in spans:
                self.store.begin_layer(layer, span)
            for first in range(0, count, PREFILL_CHUNK):
                rows = slice(first, min(first + PREFILL_CHUNK, count))
                self._layer(layer, x, turns, spans, rows, wanted)
                yield rows.stop - rows.start
            for span in spans:
                self.store.seal(layer, span)
        return x[first_output:]

    def run(self, spans: Sequence[Span], ids: Sequence[int]) -> Array:
        """`walk` without stops: hidden states (T, E)."""
        units = self.walk(spans, ids)
        while True:
            try:
                next(units)
            except StopIteration as end:
                return end.value

    def logits(self, hidden: Array) -> np.ndarray:
        """Hidden states (T, E) → logits (T, V) float32 on the host."""
        normed = self.ops.rms_norm(hidden, self.weights.norm, self.config.norm_eps)
        return self.ops.to_host(self.ops.linear(normed, self.weights.head))

    def _turns(self, positions: np.ndarray) -> tuple[Array, Array]:
        """cos and sin (T, D/2) of every position's RoPE angles; formed in float64, since positions grow large."""
        angles = positions[:, None] * self._frequencies
        factor = self._rope_factor
        return self.ops.to_device(np.cos(angles) * factor), self.ops.to_device(np.sin(angles) * factor)

    def _views(self, layer: int, spans: Sequence[Span], rows: slice) -> list[CacheSpan]:
        """Each span's part in `rows`, counted from the first of them."""
        if len(spans) == 1:
            return [self.store.view(layer, spans[0], slice(0, rows.stop - rows.start), spans[0].start + rows.start)]
        steps = enumerate(spans[rows])
        return [self.store.view(layer, span, slice(i, i + 1), span.start) for i, span in steps]

    def _layer(
        self, layer: int, x: Array, turns: tuple[Array, Array], spans: Sequence[Span], rows: slice, wanted: int
    ) -> None:
        """Take `rows` of x (T, E) through one decoder layer, in place; rows before `wanted` only leave their K/V."""
        cos, sin = turns
        parts = self.ops.parts(rows)
        views = [self._views(layer, spans, part) for part in parts]
        queries = self.ops.each(
            lambda i: self._project(layer, x[parts[i]], cos[parts[i]], sin[parts[i]], views[i]), len(parts)
        )
        # A row attends to all K/V before it: every part is projected before the first one attends.
        self.ops.each(
            lambda i: self._mix(layer, x[parts[i]], queries[i], views[i], wanted - parts[i].start), len(parts)
        )

    def _project(self, layer: int, x: Array, cos: Array, sin: Array, spans: Sequence[CacheSpan]) -> Array:
        """Append the K/V of x (T, E) to the spans and return its queries (T, H, D), as the store rotates them."""
        ops, config, w = self.ops, self.config, self.weights.layers[layer]
        heads, kv_heads, stored = config.heads, config.kv_heads, self.store.conditioning[layer]
        normed = ops.rms_norm(x, w.attention_norm, config.norm_eps)
        qkv = ops.linear(normed, w.qkv, w.qkv_bias).reshape(len(x), heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if w.q_norm is not None:
            qk[:, :heads] = ops.rms_norm(qk[:, :heads], w.q_norm, config.norm_eps)
            qk[:, heads:] = ops.rms_norm(qk[:, heads:], w.k_norm, config.norm_eps)
        ops.rope(qk, cos, sin)
        qk = ops.rotate(qk, stored.key_rotation, self._balances[layer])
        ops.append_kv(spans, qk[:, heads:], ops.rotate(v, stored.value_rotation))
        return qk[:, :heads]

    def _mix(self, layer: int, x: Array, q: Array, spans: Sequence[CacheSpan], wanted: int) -> None:
        """Attention and feed-forward: x (T, E) with queries q (T, H, D) → x, in place, from row `wanted` on."""
        if wanted >= len(x):
            return
        if wanted > 0:
            (span,) = spans
            x, q = x[wanted:], q[wanted:]
            spans = [replace(span, rows=slice(0, len(x)), position=span.position + wanted)]
        ops, config, w = self.ops, self.config, self.weights.layers[layer]
        mixed = ops.attention(q, self.store.cache(layer), spans, self._scale, config.window(layer))
        rotation = self.store.conditioning[layer].value_rotation
        mixed = ops.rotate(mixed, None if rotation is None else rotation.T)
        x += ops.linear(mixed.reshape(len(x), config.heads * config.head_dim), w.out, w.out_bias)
        normed = ops.rms_norm(x, w.ffn_norm, config.norm_eps)
        x += ops.linear(ops.silu_mul(ops.linear(normed, w.gate_up, w.gate_up_bias)), w.down, w.down_bias)
