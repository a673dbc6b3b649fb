"""A store for tests, and sequences in it that check what attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.kv import AttentionRule
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.encode import read_back
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import StorePlan, plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, SequenceKV
from tests.ops import reference

N, HEADS, KV_HEADS, D = 8, 4, 2, 16


def plan_for_sequences(shape: CacheShape, tokens: int, sequences: int) -> StorePlan:
    """The smallest store that can always hold `sequences` sequences of `tokens` each at once. `plan_for_tokens` for as
    many tokens in all has the blocks of windows for one sequence alone."""
    plan = plan_for_tokens(shape, sequences * tokens, sequences)
    blocks = zip(shape.quantized_blocks(tokens), shape.more_blocks(plan.full_slots, 0), strict=True)
    return replace(plan, quantized_blocks=tuple(sequences * each + more for each, more in blocks))


def make_store(
    codec_k="f16",
    codec_v="f16",
    mean_bits=8,
    windows=(None,),
    tokens=256,
    sequences=4,
    recent=0,
    recent_slots=None,
) -> KVStore:
    """recent_slots: None for all that `sequences` may have."""
    k, v = codecs.get(codec_k), codecs.get(codec_v)
    layers = tuple(LayerShape(k, v, KV_HEADS, D, mean_bits, window, recent_blocks=recent) for window in windows)
    plan = plan_for_tokens(CacheShape(N, layers), tokens, sequences)
    plan = plan if recent_slots is None else replace(plan, recent_slots=recent_slots)
    # Without rotations: the ops apply them, not the store.
    return KVStore(NumpyOps(), plan, [Conditioning()] * len(windows))


def held(store: KVStore) -> list[tuple[int, int]]:
    """(quantized blocks, full-precision slots) in use, per group."""
    return [(g.quantized.size - g.quantized.free, g.full.size - g.full.free) for g in store.groups]


def overwrite(store: KVStore) -> None:
    """Allocate and release every free block and slot, so that the prefix cache finds no more of them."""
    for group in store.groups:
        for allocator in (group.quantized, group.full):
            for block in allocator.allocate(allocator.free):
                allocator.release(block)


class Fed:
    """A sequence in a store and the plain K/V that went into it."""

    def __init__(self, store: KVStore, seed: int = 0):
        self.store, self.kv = store, store.new_sequence()
        self.rng = np.random.default_rng(seed)
        self.k = np.zeros((0, KV_HEADS, D), np.float32)
        self.v = np.zeros((0, KV_HEADS, D), np.float32)

    def new(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """K/V of the next tokens, float32: numbers that slots hold exactly, as half precision."""
        k, v = (self.rng.standard_normal((count, KV_HEADS, D)).astype(np.float16) for _ in "kv")
        return (k + np.float16(1)).astype(np.float32), v.astype(np.float32)

    def feed(
        self, count: int, chunk: int | None = None, *, step: bool = False, kept: int | None = None, commit: bool = True
    ) -> np.ndarray:
        """Feed `count` tokens in one span to all layers, `chunk` rows at a time; checks and returns attention's output.

        kept: how many rows of a step to keep; None: all.
        """
        start = self.kv.length
        new_k, new_v = self.new(count)
        k, v = np.concatenate([self.k, new_k]), np.concatenate([self.v, new_v])
        q = self.rng.standard_normal((count, HEADS, D)).astype(np.float32)
        span = self.store.open_step(self.kv, count) if step else self.store.open(self.kv, count)
        out = np.empty((len(self.store.shape.layers), *q.shape), np.float32)
        for layer in range(len(self.store.shape.layers)):
            self.store.begin_layer(layer, span)
            for first in range(0, count, chunk or count):
                rows = slice(first, min(first + (chunk or count), count))
                view = self.store.view(layer, span, slice(0, rows.stop - first), start + first)
                ops, cache = self.store.ops, self.store.cache(layer)
                spans = ops.spans([view], self.store.shape.block_size)
                own_q, own_k, own_v = map(ops.to_device, (q[rows], k[start:][rows], v[start:][rows]))
                ops.append_kv(cache, spans, own_k, own_v)
                window = self.store.shape.layers[layer].window
                out[layer, rows] = ops.to_host(ops.attention(own_q, cache, spans, AttentionRule(0.3, window)))
                self.check(out[layer, rows], q[rows], k, v, start, start + first, layer)
            self.store.seal(layer, span)
        if commit:
            self.store.commit(span, kept)
            assert self.kv.length == start + (count if kept is None else kept)
            self.k, self.v = k[: self.kv.length], v[: self.kv.length]
        else:
            self.store.abort(span)
        return out

    def check(self, out, q, k, v, start, position, layer) -> None:
        """The blocks after the first one are codes, up to the first in full precision."""
        shape, index = self.store.shape.layers[layer], self.store.group_of(layer)
        seen_k, seen_v = k.astype(np.float64), v.astype(np.float64)
        for number in range(1, self.store.groups[index].first_full(self.kv.tables[index], start)):
            block = slice(number * N, number * N + N)
            keys, values = (x[block].swapaxes(0, 1) for x in (k, v))
            seen_k[block] = read_back(shape.codec_k, keys, None, N, shape.mean_bits).swapaxes(0, 1)
            seen_v[block] = read_back(shape.codec_v, values, None, N).swapaxes(0, 1)
        visible = reference.causal_mask(position, len(q), len(k), shape.window)
        expected = reference.attention(q, seen_k, seen_v, visible, AttentionRule(0.3, shape.window))
        # float32 sums of |v| ≲ 5 over at most a few hundred keys
        np.testing.assert_allclose(out, expected, atol=2e-5)


def assert_held_by(store: KVStore, sequences: Sequence[SequenceKV]) -> None:
    """Assert that every block has one reference for each table of `sequences` that holds it."""
    for index, group in enumerate(store.groups):
        tables = [kv.tables[index] for kv in sequences]
        quantized = [*group.ahead.values(), *(block for table in tables for block in table.quantized)]
        full = [slot for table in tables for slot in (table.sink, *table.recent, table.current) if slot is not None]
        for allocator, holders in ((group.quantized, quantized), (group.full, full)):
            assert [allocator.references(i) for i in range(allocator.size)] == [
                holders.count(i) for i in range(allocator.size)
            ]
