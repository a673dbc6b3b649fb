"""A step of many sequences gives each what it gets alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine.backends.kv import ScoreRule, SpanView
from polarlm.engine.state.store import KVStore, SequenceKV, Span
from tests.state.fed import HEADS, KV_HEADS, D, N, make_store

LENGTHS = [0, 3, N - 1, N, N + 1, 2 * N, 5 * N + 3, 9 * N - 1]


def filled(store: KVStore, length: int, rng: np.random.Generator) -> SequenceKV:
    kv = store.new_sequence()
    if length:
        span = store.open(kv, length)
        k, v = rng.standard_normal((2, length, KV_HEADS, D)).astype(np.float32)
        for layer in range(len(store.shape.layers)):
            store.begin_layer(layer, span)
            store.ops.append_kv(store.cache(layer), [store.view(layer, span, slice(0, length), 0)], k + 1, v)
            store.seal(layer, span)
        store.commit(span)
    return kv


def begun(store: KVStore, rng: np.random.Generator, counts: Sequence[int]) -> tuple[list[Span], np.ndarray]:
    """A step of sequences of all LENGTHS with so many rows each, whose K/V are there, and its queries."""
    spans = [store.open_step(filled(store, length, rng), count) for length, count in zip(LENGTHS, counts, strict=True)]
    k, v = rng.standard_normal((2, sum(counts), KV_HEADS, D)).astype(np.float32)
    for layer in range(len(store.shape.layers)):
        store.ops.append_kv(store.cache(layer), views(store, layer, spans), k, v)
    return spans, rng.standard_normal((sum(counts), HEADS, D)).astype(np.float32)


def views(store: KVStore, layer: int, spans: list[Span]) -> list[SpanView]:
    ends = itertools.accumulate(span.count for span in spans)
    return [
        store.view(layer, span, slice(end - span.count, end), span.start) for span, end in zip(spans, ends, strict=True)
    ]


def alone(store: KVStore, layer: int, spans: list[Span], q: np.ndarray, window: int | None) -> np.ndarray:
    """Row after row of each sequence by itself."""
    ops, cache = store.ops, store.cache(layer)
    rows = [(span, row) for span in spans for row in range(span.count)]
    return np.concatenate(
        [
            ops.attention(
                q[i : i + 1], cache, [store.view(layer, span, slice(0, 1), span.start + row)], ScoreRule(0.3, window)
            )
            for i, (span, row) in enumerate(rows)
        ]
    )


@pytest.mark.parametrize("types", [("f16", "f16"), ("ring4", "ring3.5")])
def test_rows_of_many_sequences_get_what_each_gets_alone(types: tuple[str, str], rng: np.random.Generator) -> None:
    """One row and several, across block ends, with windows, with complete and incomplete sinks. Slots hold what a
    damaged model has left in them: none of it is read."""
    windows = (None, 11, 3 * N)
    store = make_store(*types, windows=windows, sequences=len(LENGTHS), step_rows=16)
    store = KVStore(store.ops, replace(store.plan, quantized_blocks=(32,) * 3), store.conditioning)
    for layer in range(len(windows)):
        store.cache(layer).full_k[:], store.cache(layer).full_v[:] = np.nan, np.inf
    spans, q = begun(store, rng, [1, 3, 2, 16, N, 9, 6, 7])
    for layer, window in enumerate(windows):
        out = store.ops.attention(q, store.cache(layer), views(store, layer, spans), ScoreRule(0.3, window))
        np.testing.assert_allclose(out, alone(store, layer, spans, q, window), atol=2e-6)
