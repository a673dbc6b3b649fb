"""A step of many sequences gives each what it gets alone, only faster."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine.backends.kv import KVLocation, SpanView
from polarlm.engine.backends.numpy import steps
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.state.store import KVStore, SequenceKV, Span
from tests.pairs import pairs
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


def begun(
    store: KVStore, rng: np.random.Generator, counts: Sequence[int] = (1,) * len(LENGTHS)
) -> tuple[list[Span], np.ndarray]:
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
            ops.attention(q[i : i + 1], cache, [store.view(layer, span, slice(0, 1), span.start + row)], 0.3, window)
            for i, (span, row) in enumerate(rows)
        ]
    )


@pytest.mark.parametrize(
    ("counts", "types", "most"),
    pairs([[1] * 8, [5] * 8, [1, 3, 2, 16, N, 9, 6, 7]], [("f16", "f16"), ("ring4", "ring3.5")], [4, 9, 64]),
)
def test_attending_together_equals_attending_alone(
    types: tuple[str, str], most: int, counts: list[int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row and several, across block ends, with windows, with complete and incomplete sinks."""
    monkeypatch.setattr(steps, "_MOST_BLOCKS", most)
    windows = (None, 11, 3 * N)
    store = make_store(*types, windows=windows, sequences=len(LENGTHS), step_rows=16)
    store = KVStore(store.ops, replace(store.plan, quantized_blocks=(32,) * 3), store.conditioning)
    spans, q = begun(store, rng, counts)
    for layer, window in enumerate(windows):
        together = store.ops.spans(views(store, layer, spans), N)
        out = store.ops.attention(q, store.cache(layer), together, 0.3, window)
        np.testing.assert_allclose(out, alone(store, layer, spans, q, window), atol=2e-6)
    parts = steps.StepSpans(views(store, 0, spans)).parts
    assert [span for part in parts for span in part] == views(store, 0, spans)
    blocks = [[len(span.table) + len(span.following) + 2 for span in part] for part in parts]
    assert all(len(part) == 1 or sum(part) <= most for part in blocks)


@pytest.mark.parametrize("counts", [[1] * 8, [4, 1, 9, 2, 16, 3, N, 5]], ids=["one", "ragged"])
def test_nan_left_in_a_slot_does_not_reach_its_next_sequence(counts: list[int], rng: np.random.Generator) -> None:
    """As after a sequence of a damaged model, whose slots another one gets."""
    store = make_store(sequences=len(LENGTHS), step_rows=16)
    cache = store.cache(0)
    cache.full_k[:], cache.full_v[:] = np.nan, np.inf
    spans, q = begun(store, rng, counts)
    out = store.ops.attention(q, cache, store.ops.spans(views(store, 0, spans), N), 0.3, None)
    np.testing.assert_allclose(out, alone(store, 0, spans, q, None), atol=2e-6)


@pytest.mark.parametrize("shape", [(5, 3), (96, 64), (1000, 576), (40, 5000)])
def test_thin_product_equals_the_product(shape: tuple[int, int], rng: np.random.Generator) -> None:
    weight = rng.standard_normal(shape).astype(np.float32)
    for rows in (2, 3, 8, 16, 32):
        x = rng.standard_normal((rows, shape[1])).astype(np.float32)
        y = steps.thin_product(x, weight)
        exact = x.astype(np.float64) @ weight.T
        np.testing.assert_allclose(y, exact, atol=1e-5 * np.sqrt(shape[1]) * np.abs(exact).max(), err_msg=str(rows))
        assert y.flags.c_contiguous, rows


def test_is_step_holds_for_several_sequences_in_slots_only() -> None:
    step = SpanView(slice(0, 1), 5, KVLocation(None, 0), 0, None, [], N)
    other = SpanView(slice(1, 2), 5, KVLocation(None, 1), 0, None, [], N)
    prompt = SpanView(slice(1, 3), 5, KVLocation((np.zeros(1), np.zeros(1)), 0), 0, None, [], N)
    assert steps.is_step([step, other])
    assert not steps.is_step([step])
    assert not steps.is_step([step, prompt])
    assert not isinstance(NumpyOps().spans([prompt], N), steps.StepSpans)


@pytest.mark.parametrize(("architecture", "gains"), [("SkylakeX", True), ("Haswell", False), ("", False)])
def test_thin_products_are_for_2_to_32_rows_on_known_kernels(architecture: str, gains: bool) -> None:
    assert steps.multiplies_in_place(architecture) == gains
    assert [steps.is_thin(rows) for rows in (1, 2, 32, 33)] == [False, True, True, False]
