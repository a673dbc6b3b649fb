"""The store: whatever the spans, every token sees what it must, and no block is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine import codecs
from engine.backends.numpy_ops import NumpyOps
from engine.conditioning import Conditioning
from engine.kv.blocks import OutOfBlocks
from engine.kv.plan import CacheShape, LayerShape, plan_for_tokens
from engine.kv.store import KVStore, SequenceKV
from tests.kv.reference import as_read, attention

N, HEADS, KV_HEADS, D = 8, 4, 2, 16


def make_store(codec_k="f16", codec_v="f16", mean_bits=8, windows=(None,), tokens=256, sequences=4) -> KVStore:
    """A store with one layer per window."""
    k, v = codecs.get(codec_k), codecs.get(codec_v)
    layers = tuple(LayerShape(k, v, mean_bits, window) for window in windows)
    plan = plan_for_tokens(CacheShape(N, KV_HEADS, D, layers), tokens, sequences)
    # Rotations are not the store's business: vectors come rotated.
    return KVStore(NumpyOps(), plan, [Conditioning()] * len(windows))


def held(store: KVStore) -> list[tuple[int, int]]:
    """Blocks and slots in use, per group."""
    return [(g.coded.size - g.coded.free, g.exact.size - g.exact.free) for g in store.groups]


class Fed:
    """A sequence in a store and the plain K/V that went into it."""

    def __init__(self, store: KVStore, seed: int = 0):
        self.store, self.kv = store, store.new_sequence()
        self.rng = np.random.default_rng(seed)
        self.k = np.zeros((0, KV_HEADS, D), np.float32)
        self.v = np.zeros((0, KV_HEADS, D), np.float32)

    def feed(self, count: int, chunk: int | None = None, *, commit: bool = True) -> np.ndarray:
        """`count` tokens through one span, `chunk` rows at a time, in every layer; checks what they see."""
        start = self.kv.length
        k = np.concatenate([self.k, self.rng.standard_normal((count, KV_HEADS, D)).astype(np.float32) + 1])
        v = np.concatenate([self.v, self.rng.standard_normal((count, KV_HEADS, D)).astype(np.float32)])
        q = self.rng.standard_normal((count, HEADS, D)).astype(np.float32)
        span = self.store.open(self.kv, count)
        out = np.empty((len(self.store.shape.layers), *q.shape), np.float32)
        for layer in range(len(self.store.shape.layers)):
            self.store.begin_layer(layer, span)
            for first in range(0, count, chunk or count):
                rows = slice(first, min(first + (chunk or count), count))
                view = self.store.view(layer, span, slice(0, rows.stop - first), start + first)
                self.store.ops.append_kv(self.store.cache(layer), [view], k[start:][rows], v[start:][rows])
                window = self.store.shape.layers[layer].window
                out[layer, rows] = self.store.ops.attention(q[rows], self.store.cache(layer), [view], 0.3, window)
                self.check(out[layer, rows], q[rows], k, v, start, start + first, layer)
            self.store.seal(layer, span)
        if commit:
            self.store.commit(span)
            self.k, self.v = k, v
        else:
            self.store.abort(span)
        return out

    def check(self, out, q, k, v, start, position, layer) -> None:
        of = self.store.shape.layers[layer]
        seen_k, seen_v = as_read(k, v, start, N, of.codec_k.name, of.codec_v.name, of.mean_bits)
        expected = attention(q, seen_k, seen_v, position, 0.3, of.window)
        # float32 sums of |v| ≲ 5 over at most a few hundred keys
        np.testing.assert_allclose(out, expected, atol=2e-5)


@pytest.mark.parametrize("codec", ["f16", "polarquant"])
@pytest.mark.parametrize("mean_bits", [0, 8, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 20])
def test_every_token_sees_sink_codes_and_tail(codec: str, mean_bits: int, window: int | None) -> None:
    sequence = Fed(make_store(codec, codec, mean_bits, (window,)))
    for count, chunk in [(3, None), (1, None), (40, 7), (1, None), (1, None), (1, None), (6, 1), (30, None), (1, None)]:
        sequence.feed(count, chunk)
    for _ in range(2 * N + 1):
        sequence.feed(1)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 9))
@settings(max_examples=25)
def test_chunk_size_never_changes_what_is_stored(counts: list[int], chunk: int) -> None:
    whole, cut = Fed(make_store("polarquant", "polarquant")), Fed(make_store("polarquant", "polarquant"))
    for count in counts:
        whole.feed(count)
        cut.feed(count, chunk)
    a, b = whole.store.cache(0), cut.store.cache(0)
    for fields_a, fields_b in ((a.k, b.k), (a.v, b.v), (a.mean, b.mean)):
        assert all(np.array_equal(fields_a[name], fields_b[name]) for name in fields_a)
    assert whole.kv == cut.kv


def test_steps_and_prompts_store_the_same_codes() -> None:
    prompt, steps = Fed(make_store("polarquant", "polarquant")), Fed(make_store("polarquant", "polarquant"))
    prompt.feed(50)
    # The same random stream in both: K/V of the prompt, replayed one by one.
    steps.k, steps.v = prompt.k[:0], prompt.v[:0]
    for t in range(50):
        span = steps.store.open(steps.kv, 1)
        view = steps.store.view(0, span, slice(0, 1), t)
        steps.store.ops.append_kv(steps.store.cache(0), [view], prompt.k[t : t + 1], prompt.v[t : t + 1])
        steps.store.seal(0, span)
        steps.store.commit(span)
    for name, codes in prompt.store.cache(0).k.items():
        ids, replayed = prompt.kv.tables[0].coded, steps.kv.tables[0].coded
        assert np.array_equal(codes[:, ids], steps.store.cache(0).k[name][:, replayed])


@pytest.mark.parametrize("first", [0, 3, N, 20])
@pytest.mark.parametrize("count", [1, 2, N, 3 * N + 1])
def test_an_aborted_span_changes_nothing(first: int, count: int) -> None:
    sequence = Fed(make_store("polarquant", "polarquant", windows=(None, 12)))
    if first:
        sequence.feed(first)
    before = held(sequence.store)
    sequence.feed(count, commit=False)
    assert held(sequence.store) == before
    sequence.feed(5)
    sequence.feed(1)


@pytest.mark.parametrize("length", range(0, 45, 3))
def test_a_fork_continues_like_the_original(length: int) -> None:
    original = Fed(make_store("polarquant", "polarquant"))
    original.feed(44)
    length = original.store.forkable(original.kv, length)
    fork = Fed(original.store, seed=1)
    fork.kv, fork.k, fork.v = original.store.fork(original.kv, length), original.k[:length], original.v[:length]
    fork.feed(1)
    fork.feed(20)
    original.feed(3)
    original.store.release(original.kv)
    fork.feed(2)
    original.store.release(fork.kv)
    assert held(original.store) == [(0, 0)]


@pytest.mark.parametrize(("length", "kept"), [(44, 44), (43, 43), (40, 40), (39, 32), (9, 8), (7, 7), (99, 44)])
def test_a_fork_keeps_whole_blocks_and_any_part_of_the_tail(length: int, kept: int) -> None:
    original = Fed(make_store())
    original.feed(44)
    assert original.store.forkable(original.kv, length) == kept


def test_blocks_outside_the_window_are_given_back() -> None:
    sequence = Fed(make_store("polarquant", "polarquant", windows=(20,)))
    for count in (50, 1, 30, *[1] * 40):
        sequence.feed(count)
        coded, exact = held(sequence.store)[0]
        # 20 tokens touch at most 4 blocks of 8, the current one included; the first block is long gone.
        assert coded <= 3
        assert exact <= 1
    assert sequence.kv.tables[0].sink is None


def test_layers_with_different_windows_keep_different_blocks() -> None:
    sequence = Fed(make_store("polarquant", "polarquant", windows=(None, 12, None)))
    sequence.feed(100)
    assert held(sequence.store) == [(100 // N - 1, 2), (1, 1)]


def test_running_out_of_blocks_changes_nothing() -> None:
    store = make_store(tokens=40, sequences=1)
    sequence = Fed(store)
    sequence.feed(30)
    before = held(store), sequence.kv.length
    with pytest.raises(OutOfBlocks):
        store.open(sequence.kv, 100)
    assert (held(store), sequence.kv.length) == before
    sequence.feed(10)


def test_bytes_held_are_those_of_the_arrays() -> None:
    sequence = Fed(make_store("polarquant", "polarquant", windows=(None, None)))
    sequence.feed(45)  # sink, 4 coded blocks, tail
    expected = 0
    for layer in range(2):
        cache = sequence.store.cache(layer)
        expected += 4 * sum(
            field[:, :1].nbytes for field in [*cache.k.values(), *cache.v.values(), *cache.mean.values()]
        )
        expected += 2 * (cache.exact_k[:1].nbytes + cache.exact_v[:1].nbytes)
    assert sequence.store.bytes_held(sequence.kv) == expected


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
@settings(max_examples=25)
def test_what_a_sequence_takes_is_known_from_its_length(counts: list[int]) -> None:
    sequence = Fed(make_store("polarquant", "polarquant", windows=(None, 1, 8, 20)))
    for count in counts:
        sequence.feed(count)
        assert sequence.store.bytes_held(sequence.kv) == sequence.store.shape.sequence_bytes(sequence.kv.length)


class Schedules(RuleBasedStateMachine):
    """Sequences that grow, fork, fail and end in any order: the allocators always agree with the block tables."""

    @initialize()
    def start(self) -> None:
        self.store = make_store(windows=(None, 12), tokens=120, sequences=3)
        self.sequences: list[SequenceKV] = []

    @rule()
    def begin(self) -> None:
        self.sequences.append(self.store.new_sequence())

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 30), commit=st.booleans())
    def grow(self, data, count: int, commit: bool) -> None:
        kv = data.draw(st.sampled_from(self.sequences))
        try:
            span = self.store.open(kv, count)
        except OutOfBlocks:
            return
        if commit:
            self.store.commit(span)
        else:
            self.store.abort(span)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), length=st.integers(0, 60))
    def fork(self, data, length: int) -> None:
        kv = data.draw(st.sampled_from(self.sequences))
        try:
            self.sequences.append(self.store.fork(kv, self.store.forkable(kv, length)))
        except OutOfBlocks:
            return

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data) -> None:
        kv = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(kv)
        self.store.release(kv)

    @invariant()
    def references_are_those_of_the_tables(self) -> None:
        for index, group in enumerate(self.store.groups):
            tables = [kv.tables[index] for kv in self.sequences]
            coded = [block for table in tables for block in table.coded]
            exact = [slot for table in tables for slot in (table.sink, table.tail) if slot is not None]
            for allocator, holders in ((group.coded, coded), (group.exact, exact)):
                assert [allocator.references(i) for i in range(allocator.size)] == [
                    holders.count(i) for i in range(allocator.size)
                ]


TestSchedules = Schedules.TestCase
