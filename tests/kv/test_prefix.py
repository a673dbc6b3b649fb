"""The prefix cache: what is found is what was stored for exactly these tokens, and finding it loses no block."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.backends.ops import STEP_ROWS
from engine.kv.blocks import OutOfBlocks
from engine.kv.prefix import PrefixCache
from engine.kv.store import KVStore
from tests.kv.fed import KV_HEADS, D, Fed, N, assert_held_by, held, make_store, overwrite


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


class Told(Fed):
    """A sequence whose K/V are a function of all tokens so far, as in a model; checked as it is read."""

    def __init__(self, store: KVStore, prefixes: PrefixCache, ids: Sequence[int]):
        super().__init__(store)
        self.prefixes, self.ids = prefixes, list(ids)
        self.kv = prefixes.match_prefix(ids[:-1])
        self.found = self.kv.length
        self.k, self.v = self._plain(0, self.found)

    def _plain(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = (np.zeros((stop - start, KV_HEADS, D), np.float32) for _ in "kv")
        for row, at in enumerate(range(start, stop)):
            rng = np.random.default_rng(zlib.crc32(np.asarray(self.ids[: at + 1]).tobytes()))
            k[row], v[row] = rng.standard_normal((2, KV_HEADS, D))
        return k + 1, v

    def new(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self._plain(self.kv.length, self.kv.length + count)

    def feed(
        self, count: int, chunk: int | None = None, *, step: bool = False, kept: int | None = None, commit: bool = True
    ) -> np.ndarray:
        out = super().feed(count, chunk, step=step, kept=kept, commit=commit)
        self.prefixes.insert(self.kv, self.ids)
        return out

    def prompt(self) -> Told:
        """Feed what was not found."""
        self.feed(len(self.ids) - self.kv.length)
        return self

    def step(self, *ids: int) -> Told:
        """Tokens one by one."""
        for token in ids:
            self.ids.append(token)
            self.feed(1, step=True)
        return self

    def draft(self, ids: Sequence[int], kept: int) -> Told:
        """A step of several tokens, the first `kept` of which are accepted."""
        accepted = [*self.ids, *ids[:kept]]
        self.ids += ids
        self.feed(len(ids), step=True, kept=kept)
        self.ids = accepted
        return self

    def end(self) -> None:
        self.prefixes.release(self.kv, self.ids)


class House:
    """A store, its prefix cache, and how many tokens a prompt finds."""

    def __init__(self, codec: str = "f16", windows=(None,), identity: bytes = b"", **more):
        self.store = make_store(codec, codec, windows=windows, **more)
        self.prefixes = PrefixCache(self.store, identity)

    def tell(self, ids: Sequence[int]) -> Told:
        return Told(self.store, self.prefixes, ids).prompt()

    def found(self, ids: Sequence[int]) -> int:
        kv = self.prefixes.match_prefix(ids)
        length = kv.length
        self.prefixes.release(kv, ids)
        return length


STEM = words(0, 44)  # five blocks and four tokens


@pytest.mark.parametrize("codec", ["f16", "polarquant"])
@pytest.mark.parametrize("length", range(1, 48, 3))
def test_whoever_shares_a_beginning_goes_on_from_it(codec: str, length: int) -> None:
    house = House(codec)
    first = house.tell(STEM)
    branch = house.tell([*STEM[:length], *words(1, 5)])
    # While it goes on, its complete blocks; of the first, which is exact, any part.
    assert branch.found == (length if length < N else min(length, 44) // N * N)
    branch.step(*words(2, 20))
    first.step(*words(3, 3))
    first.end()
    branch.step(*words(4, 2))
    branch.end()
    assert held(house.store) == [(0, 0)]


@pytest.mark.parametrize(("length", "found"), [(44, 44), (43, 43), (41, 41), (40, 40), (39, 32), (9, 8), (7, 7)])
def test_of_a_sequence_that_ended_exact_blocks_are_found_in_part(length: int, found: int) -> None:
    house = House("polarquant")
    house.tell(STEM).end()
    branch = Told(house.store, house.prefixes, [*STEM[:length], *words(1, 9)])
    assert branch.found == found
    branch.prompt().step(*words(2, 3))


def test_the_whole_of_it_is_gone_on_with_and_not_copied() -> None:
    house = House(sequences=1)
    for turn in range(4):
        house.tell([*STEM, *words(1, 5 * turn)]).end()
    assert house.found([*STEM, *words(1, 15)]) == 59


def test_a_part_is_found_where_there_is_no_room_for_a_copy() -> None:
    house = House(sequences=1)
    house.tell(STEM).end()
    taken = house.store.groups[0].full.allocate(1)  # the one slot that is neither sink nor tail
    assert house.found(STEM[:42]) == 40
    house.store.groups[0].full.release(taken[0])


def test_a_copy_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a device fails, or Ctrl-C comes between two layers."""
    house, ids = House(windows=(None, 12)), words(1, 2 * N + 5)
    house.prefixes.release(house.tell(ids).kv, ids)
    with monkeypatch.context() as patch:
        patch.setattr(house.store.ops, "copy_full", Mock(side_effect=[None, KeyboardInterrupt()]))
        with pytest.raises(KeyboardInterrupt):
            house.prefixes.match_prefix(ids[: 2 * N + 3])
    assert_held_by(house.store, [])
    assert house.found(ids) == len(ids)


def test_other_tokens_before_a_block_make_another_block() -> None:
    house = House()
    house.tell(STEM).end()
    assert house.found([*words(9, N), *STEM[N:]]) == 0
    assert house.found([*STEM[:N], *words(9, N), *STEM[2 * N :]]) == N


def test_what_decides_the_codes_decides_the_hash() -> None:
    one, other = House(identity=b"ring4"), House(identity=b"ring5")
    one.tell(STEM)
    other.tell(STEM)
    assert not set(one.prefixes._quantized) & set(other.prefixes._quantized)
    assert len(one.prefixes._quantized) == 4


def test_nothing_is_found_where_nothing_may_be() -> None:
    house = House()
    house.prefixes = PrefixCache(house.store, enabled=False)
    house.tell(STEM).end()
    assert house.found(STEM) == 0


def test_nothing_is_found_of_what_is_overwritten_and_who_goes_on_is_not_disturbed() -> None:
    house = House(windows=(None, 12))
    house.tell(words(1, 30)).end()
    running = house.tell(STEM)
    assert house.found(words(1, 30)) > 0
    overwrite(house.store)
    assert house.found(words(1, 30)) == 0
    running.step(*words(2, 20))
    running.end()


def test_what_nobody_has_asked_for_the_longest_is_overwritten_first() -> None:
    house = House(tokens=96, sequences=4)  # 11 quantized blocks
    a, b, c = (words(seed, 40) for seed in (1, 2, 3))  # a sink and 4 quantized blocks each
    for ids in (a, b, a, c):
        house.tell(ids).end()
    assert (house.found(a), house.found(c)) == (40, 40)
    assert house.found(b) == 32  # the last of its blocks is the first to go


@pytest.mark.parametrize("windows", [(20,), (None, 12)])
def test_what_a_window_has_left_behind_need_not_be_there(windows: tuple[int | None, ...]) -> None:
    house = House("polarquant", windows)
    told = house.tell(STEM).step(*words(1, 30))
    again = house.tell([*told.ids, *words(2, 5)])
    assert again.found == 72
    again.step(*words(3, 9))
    told.step(*words(4, 9))
    told.end()
    again.end()
    assert held(house.store) == [(0, 0)] * len(windows)


class Schedules(RuleBasedStateMachine):
    """Sequences of few different tokens come and go in any order in a store that is too small for them."""

    @initialize(windows=st.sampled_from([(None,), (12,), (None, 12)]))
    def start(self, windows) -> None:
        self.house = House("polarquant", windows, tokens=64, sequences=3, step_rows=N)
        self.told: list[Told] = []

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=4), count=st.integers(1, 40))
    def begin(self, ids: list[int], count: int) -> None:
        told = Told(self.house.store, self.house.prefixes, [i for i in ids for _ in range(9)][:count])
        self.told.append(told)
        self._grow(told, told.prompt)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def step(self, data, ids: list[int]) -> None:
        told = data.draw(st.sampled_from(self.told))
        self._grow(told, lambda: told.step(*ids))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=STEP_ROWS))
    def draft(self, data, ids: list[int]) -> None:
        told = data.draw(st.sampled_from(self.told))
        kept = data.draw(st.integers(0, len(ids)))
        self._grow(told, lambda: told.draft(ids, kept))

    def _grow(self, told: Told, how) -> None:
        try:
            how()
        except OutOfBlocks:
            self.told.remove(told)
            told.end()

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def end(self, data) -> None:
        told = data.draw(st.sampled_from(self.told))
        self.told.remove(told)
        told.end()

    @rule()
    def overwrite(self) -> None:
        overwrite(self.house.store)

    @invariant()
    def nothing_else_holds_blocks(self) -> None:
        if hasattr(self, "house"):
            assert_held_by(self.house.store, [told.kv for told in self.told])


TestSchedules = Schedules.TestCase
