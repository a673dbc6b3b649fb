"""The prefix cache: a hit holds the K/V of exactly its tokens, and no block leaks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from tests.pairs import mostly_slow
from tests.state.fed import KV_HEADS, D, Fed, N, assert_held_by, held, make_store, overwrite


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


class CachedSequence(Fed):
    """A sequence whose K/V depend on all of its tokens, as in a model; `feed` checks what attention reads."""

    def __init__(self, store: KVStore, prefixes: PrefixCache, ids: Sequence[int]):
        super().__init__(store)
        self.prefixes, self.ids = prefixes, list(ids)
        self.kv = prefixes.match_prefix(ids[:-1])
        self.found = self.kv.length
        self.k, self.v = self._plain(0, self.found)

    def _plain(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = (np.zeros((stop - start, KV_HEADS, D), np.float16) for _ in "kv")
        for row, at in enumerate(range(start, stop)):
            rng = np.random.default_rng(zlib.crc32(np.asarray(self.ids[: at + 1]).tobytes()))
            k[row], v[row] = rng.standard_normal((2, KV_HEADS, D))
        return (k + np.float16(1)).astype(np.float32), v.astype(np.float32)  # numbers that slots hold exactly

    def new(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self._plain(self.kv.length, self.kv.length + count)

    def feed(
        self, count: int, chunk: int | None = None, *, step: bool = False, kept: int | None = None, commit: bool = True
    ) -> np.ndarray:
        out = super().feed(count, chunk, step=step, kept=kept, commit=commit)
        self.prefixes.insert(self.kv, self.ids)
        return out

    def prompt(self) -> CachedSequence:
        """Feed the tokens after the prefix hit."""
        self.feed(len(self.ids) - self.kv.length)
        return self

    def step(self, *ids: int) -> CachedSequence:
        for token in ids:
            self.ids.append(token)
            self.feed(1, step=True)
            if token % 2:
                self.store.encode_ahead()
        return self

    def draft(self, ids: Sequence[int], kept: int) -> CachedSequence:
        """Feed `ids` in one step and keep the first `kept`."""
        accepted = [*self.ids, *ids[:kept]]
        self.ids += ids
        self.feed(len(ids), step=True, kept=kept)
        self.ids = accepted
        return self

    def end(self) -> None:
        self.prefixes.release(self.kv, self.ids)


class CachedStore:
    def __init__(self, codec: str = "f16", windows=(None,), identity: bytes = b"", **more):
        self.store = make_store(codec, codec, windows=windows, **more)
        self.prefixes = PrefixCache(self.store, identity)

    def prefill(self, ids: Sequence[int]) -> CachedSequence:
        return CachedSequence(self.store, self.prefixes, ids).prompt()

    def found(self, ids: Sequence[int]) -> int:
        kv = self.prefixes.match_prefix(ids)
        length = kv.length
        self.prefixes.release(kv, ids)
        return length


STEM = words(0, 44)  # five blocks and four tokens


@pytest.mark.parametrize(
    ("codec", "length"), [("f16", 1), ("polarquant", N - 1), ("polarquant", N), ("f16", 25), ("polarquant", 46)]
)
def test_a_prompt_goes_on_from_the_prefix_that_it_shares(codec: str, length: int) -> None:
    cached = CachedStore(codec)
    first = cached.prefill(STEM)
    branch = cached.prefill([*STEM[:length], *words(1, 5)])
    # Of a running sequence: its complete blocks, and any part of the first, which is in full precision.
    assert branch.found == (length if length < N else min(length, 44) // N * N)
    branch.step(*words(2, 20))
    first.step(*words(3, 3))
    first.end()
    branch.step(*words(4, 2))
    branch.end()
    assert held(cached.store) == [(0, 0)]


def test_full_precision_blocks_of_a_released_sequence_match_in_part() -> None:
    for length, found in ((44, 44), (41, 41), (40, 40), (39, 32), (9, 8), (7, 7)):
        cached = CachedStore("polarquant")
        cached.prefill(STEM).end()
        branch = CachedSequence(cached.store, cached.prefixes, [*STEM[:length], *words(1, 9)])
        assert branch.found == found
        branch.prompt().step(*words(2, 3))


def test_a_current_block_that_matches_as_a_whole_is_not_copied() -> None:
    cached = CachedStore(sequences=1)
    for turn in range(4):
        cached.prefill([*STEM, *words(1, 5 * turn)]).end()
    assert cached.found([*STEM, *words(1, 15)]) == 59


def test_a_hit_ends_before_the_current_block_if_no_slot_is_free() -> None:
    cached = CachedStore(sequences=1)
    cached.prefill(STEM).end()
    taken = cached.store.groups[0].full.allocate(1)  # the one slot that is neither a sink nor a current block
    assert cached.found(STEM[:42]) == 40
    cached.store.groups[0].full.release(taken[0])


def test_a_copy_that_fails_holds_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, if a device fails, or Ctrl-C comes between two layers."""
    cached, ids = CachedStore(windows=(None, 12)), words(1, 2 * N + 5)
    cached.prefixes.release(cached.prefill(ids).kv, ids)
    with monkeypatch.context() as patch:
        patch.setattr(cached.store.ops, "copy_full", Mock(side_effect=[None, KeyboardInterrupt()]))
        with pytest.raises(KeyboardInterrupt):
            cached.prefixes.match_prefix(ids[: 2 * N + 3])
    assert_held_by(cached.store, [])
    assert cached.found(ids) == len(ids)


def test_the_hash_depends_on_the_identity() -> None:
    one, other = CachedStore(identity=b"ring4"), CachedStore(identity=b"ring5")
    one.prefill(STEM)
    other.prefill(STEM)
    assert not set(one.prefixes._quantized_blocks) & set(other.prefixes._quantized_blocks)
    assert len(one.prefixes._quantized_blocks) == 4


def test_the_least_recently_used_blocks_are_overwritten_first() -> None:
    cached = CachedStore(tokens=96, sequences=4)  # 11 quantized blocks
    a, b, c = (words(seed, 40) for seed in (1, 2, 3))  # a sink and 4 quantized blocks each
    for ids in (a, b, a, c):
        cached.prefill(ids).end()
    assert (cached.found(a), cached.found(c)) == (40, 40)
    assert cached.found(b) == 32  # the last of its blocks is the first to go


@pytest.mark.parametrize("windows", [(20,), (None, 12)])
def test_blocks_outside_the_window_are_not_needed_for_a_hit(windows: tuple[int | None, ...]) -> None:
    cached = CachedStore("polarquant", windows)
    sequence = cached.prefill(STEM).step(*words(1, 30))
    again = cached.prefill([*sequence.ids, *words(2, 5)])
    assert again.found == 72
    again.step(*words(3, 9))
    sequence.step(*words(4, 9))
    sequence.end()
    again.end()
    assert held(cached.store) == [(0, 0)] * len(windows)


class Schedules(RuleBasedStateMachine):
    """Sequences of few different tokens begin, grow and end in any order in a store that is too small for all."""

    @initialize(
        windows=st.sampled_from([(None,), (12,), (None, 12), (None,) * 5]),
        recent=st.integers(0, 3),
        slots=st.integers(0, 9),
    )
    def start(self, windows, recent: int, slots: int) -> None:
        room = {"tokens": 64, "sequences": 5, "recent": recent, "recent_slots": min(slots, 3 * recent)}
        self.cached = CachedStore("polarquant", windows, **room)
        self.live: list[CachedSequence] = []

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=4), count=st.integers(1, 40))
    def begin(self, ids: list[int], count: int) -> None:
        sequence = CachedSequence(self.cached.store, self.cached.prefixes, [i for i in ids for _ in range(9)][:count])
        self.live.append(sequence)
        self._grow(sequence, sequence.prompt)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def step(self, data, ids: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self._grow(sequence, lambda: sequence.step(*ids))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=STEP_ROWS))
    def draft(self, data, ids: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        kept = data.draw(st.integers(0, len(ids)))
        self._grow(sequence, lambda: sequence.draft(ids, kept))

    def _grow(self, sequence: CachedSequence, how) -> None:
        try:
            how()
        except OutOfBlocks:
            self._end(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data) -> None:
        self._end(data.draw(st.sampled_from(self.live)))

    def _end(self, sequence: CachedSequence) -> None:
        self.live.remove(sequence)
        sequence.end()

    @rule()
    def overwrite(self) -> None:
        overwrite(self.cached.store)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def damage(self, data) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.cached.prefixes.discard(sequence.kv)

    @invariant()
    def nothing_else_holds_blocks(self) -> None:
        if hasattr(self, "cached"):
            store = self.cached.store
            assert_held_by(store, [sequence.kv for sequence in self.live])
            for sequence in self.live:
                blocks = [(table.first_recent, len(table.recent)) for table in sequence.kv.tables]
                assert all(not count or first + count == sequence.kv.length // N for first, count in blocks)
                if not store.shape.recent_blocks:
                    assert store.bytes_held(sequence.kv) == store.shape.sequence_bytes(sequence.kv.length)


@mostly_slow("examples", [15, 200], [15])
def test_schedules(examples: int) -> None:
    run_state_machine_as_test(Schedules, settings=settings(max_examples=examples))
