"""The store: whatever the spans, every token sees what it must, and no block is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.blocks import OutOfBlocks
from engine.kv.store import SequenceKV
from tests.kv.fed import Fed, N, assert_held_by, held, make_store


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
    """Sequences that grow, fail and end in any order: the allocators always agree with the block tables."""

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
    @rule(data=st.data())
    def end(self, data) -> None:
        kv = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(kv)
        self.store.release(kv)

    @invariant()
    def references_are_those_of_the_tables(self) -> None:
        assert_held_by(self.store, self.sequences)


TestSchedules = Schedules.TestCase


@pytest.mark.parametrize("types", [("ring4", "ring3.5"), ("polarquant", "turbo3"), ("f16", "f16")])
def test_blocks_that_a_step_fills_are_encoded_together_as_they_are_alone(types: tuple[str, str]) -> None:
    stores = [make_store(*types), make_store(*types)]
    alone, together = ([Fed(store, seed) for seed in range(3)] for store in stores)
    for number in range(3):  # the last one fills no block
        for fed in (alone[number], together[number]):
            fed.feed(2 * N - 1 - number // 2)
    for fed in alone:
        fed.feed(1)
    store, spans = stores[1], [stores[1].open(fed.kv, 1) for fed in together]
    for i, (fed, span) in enumerate(zip(together, spans, strict=True)):
        k, v = fed.new(1)
        view = store.view(0, span, slice(0, 1), span.start)
        store.ops.append_kv(store.cache(0), [view], k, v)
        assert bool(span.growth[0].coded) == (i < 2)
    store.seal_steps(spans)
    for span in spans:
        store.commit(span)
    for one, other in zip(alone, together, strict=True):
        tables = one.kv.tables[0].coded, other.kv.tables[0].coded
        assert len(tables[0]) == len(tables[1])
        if tables[0]:
            found = [s.ops.read_blocks(s.cache(0), table) for s, table in zip(stores, tables, strict=True)]
            assert all((found[0][name] == found[1][name]).all() for name in found[0])
