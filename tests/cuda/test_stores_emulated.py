"""Stores of K/V on the emulated device: sequences that come and go, against NumPy's, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda.kv.cache import HEADER
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import CacheFormat, KVLocation, ScoreRule, SpanView
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, SequenceKV, Span
from tests.cuda.emulated import open_device
from tests.cuda.formats import STEP

HOST = NumpyOps()
N, HEADS, KV_HEADS, D = 16, 4, 2, 16


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(open_device())


def test_stores_of_two_block_sizes_may_share_the_ops(ops: CudaOps) -> None:
    format = store_of(ops, ("f16", "f16"), (None,)).cache(0).format
    other = ops.cache(replace(format, block_size=2 * N), 1, 2)
    span = SpanView(slice(0, 1), 5 * N, KVLocation(None, 0), 4 * N, 1, [0], 2 * N)
    assert ops.spans([span], other.format.block_size).table[0, :HEADER].tolist() == [0, 1, 5 * N, 1, 1, 1, 0, 2, 1, 0]
    assert ops.spans([span], format.block_size).table[0, :HEADER].tolist() == [0, 1, 5 * N, 1, 2, 1, 0, 4, 1, 0]


def store_of(
    ops: Ops, types: tuple[str, str], windows: Sequence[int | None], metrics: Sequence | None = None
) -> KVStore:
    k, v = (codecs.get(name) for name in types)
    layers = tuple(LayerShape(k, v, KV_HEADS, D, 0 if types[0] == "f16" else 8, window) for window in windows)
    plan = plan_for_tokens(CacheShape(N, layers), 200, 4, 16)
    return KVStore(ops, plan, [Conditioning()] * len(windows), metrics)


def halves(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers that full-precision records hold as they are."""
    return (rng.standard_normal(shape) + 0.5).astype(np.float16).astype(np.float32)


def described(store: KVStore, spans: Sequence[Span], count: int, layer: int = 0) -> Any:
    """The table of spans of `count` rows each, which begin in a layer."""
    for span in spans:
        store.begin_layer(layer, span)
    views = [store.view(layer, span, slice(i * count, (i + 1) * count), span.start) for i, span in enumerate(spans)]
    return store.ops.spans(views, N)


def feed(
    store: KVStore,
    sequences: Sequence[SequenceKV],
    count: int,
    seed: int,
    *,
    step: bool = False,
    kept: int | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """`count` random tokens of each sequence through all layers, from rows with a head of keys and values too many;
    what they see. kept: of the rows of a step."""
    ops, rng = store.ops, np.random.default_rng(seed)
    spans = [store.open_step(kv, count) if step else store.open(kv, count, **options) for kv in sequences]
    rows, seen = count * len(sequences), []
    q, k, v = (halves(rng, rows, heads, D) for heads in (HEADS, KV_HEADS + 1, KV_HEADS + 1))
    for layer, of in enumerate(store.shape.layers):
        table, cache = described(store, spans, count, layer), store.cache(layer)
        ops.append_kv(cache, table, ops.to_device(k)[:, 1:], ops.to_device(v)[:, 1:])
        for span in spans:
            store.seal(layer, span)
            if span.round_trip:
                store.round_trip(layer, span)
        out = ops.attention(ops.to_device(q), cache, table, ScoreRule(D**-0.5, of.window))
        seen.append(np.array(ops.to_host(out)))
    store.commit_steps(spans, [kept] * len(spans))
    return seen


def everything_seen(ops: Ops, types: tuple[str, str]) -> list[np.ndarray]:
    """Prompts shorter and longer than a block, steps across its end, shared blocks, two sequences in one step."""
    store = store_of(ops, types, (None, 20))
    first = store.new_sequence()
    seen = [out for i, count in enumerate((9, 30, 1, 21)) for out in feed(store, [first], count, i)]
    for i in range(4, 10):
        seen += feed(store, [first], 1, i, step=True)
    prefixes, ids = PrefixCache(store), range(first.length)
    prefixes.release(first, ids)
    # One has a copy of the tail, the other the tail.
    second, first = prefixes.match_prefix(ids[:-1]), prefixes.match_prefix(ids)
    for i in range(N + 1):
        seen += feed(store, [second], 1, 100 + i, step=True)
    for i in range(3):
        seen += feed(store, [first, second], 1, 200 + i, step=True)
    return seen


def drafts_seen(ops: Ops, types: tuple[str, str]) -> list[np.ndarray]:
    """Steps of several rows, where some are kept, across block ends, of one sequence and of two."""
    store = store_of(ops, types, (None, 20))
    sequences = [store.new_sequence() for _ in range(2)]
    seen = [
        out for kv, count in zip(sequences, (N - 3, 2 * N + 1), strict=True) for out in feed(store, [kv], count, count)
    ]
    for seed, (count, kept) in enumerate(((5, 1), (3, 3), (N, 2), (1, 1), (N, N), (16, 7))):
        seen += feed(store, sequences[seed % 2 :], count, 300 + seed, step=True, kept=kept)
    return seen


TYPES = [("f16", "f16"), ("ring4", "ring3.5"), ("turbo4", "f16"), ("polarquant", "ring5"), ("trellis4", "trellis3")]


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES)
def test_prefill_and_steps_attend_as_on_the_host(types: tuple[str, str]) -> None:
    """All inputs are exact in half precision, so that codes are equal and only sums differ."""
    ops = CudaOps(open_device(checked=False))
    on_device, on_host = ([*everything_seen(at, types), *drafts_seen(at, types)] for at in (ops, HOST))
    for seen, wanted in zip(on_device, on_host, strict=True):
        # Scores come from queries and keys in half precision, weights of tokens are in half precision as well.
        assert np.abs(seen - wanted).max() <= 4 * STEP["__half"] * np.abs(wanted).max()


def format_of(k: str, v: str, block_size: int = 64, head_dim: int = 128) -> CacheFormat:
    return CacheFormat(codecs.get(k), codecs.get(v), None, None, 8, block_size, 8, head_dim)


@pytest.mark.parametrize(
    ("format", "words"),
    [
        (format_of("kivi4", "ring4"), "kivi4 has no GPU kernel"),
        (format_of("ring4", "q8_0"), "q8_0 has no GPU kernel"),
        (format_of("ring4", "ring4", block_size=24), "not 24: choose another block size"),
        (format_of("polarquant", "f16", block_size=128, head_dim=256), "choose 64"),
        (format_of("f16", "f16", head_dim=20), "multiple of 8"),
    ],
)
def test_formats_without_a_kernel_are_refused(ops: CudaOps, format: CacheFormat, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        ops.cache_bytes(format)
    assert "\n" not in str(caught.value)


def test_a_store_that_does_not_fit_is_refused(ops: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(shape: tuple[int, ...], dtype: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ops._device, "empty", full)
    with pytest.raises(EngineError, match=r"KV store does not fit .* GiB are left .* kv_memory") as caught:
        ops.cache(format_of("f16", "f16"), 10, 2)
    assert caught.value.code == "out_of_memory"
