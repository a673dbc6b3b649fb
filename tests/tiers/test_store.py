"""Blocks on their way from the store to a place and back: a hit holds the K/V of exactly its tokens, and none leaks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from polarlm.engine.storage.payloads import Payloads
from polarlm.engine.storage.tiers.names import ObjectNames
from polarlm.engine.storage.tiers.query import Tier, TierQuery
from polarlm.engine.storage.tiers.search import Budget, Search, TierHit
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess
from polarlm.engine.storage.tiers.tier_store import MemoryTier
from polarlm.engine.storage.tiers.writing import WaitingBlocks, Writer
from tests.pairs import mostly_slow
from tests.state import test_prefix
from tests.state.fed import N, overwrite
from tests.state.test_prefix import CachedSequence, CachedStore, words


class NoLock:
    """For a single thread."""

    is_wanted = False

    def hold(self) -> nullcontext[None]:
        return nullcontext()


class AtOnce(Writer):
    """Writes without a thread."""

    def _queue(self, work) -> None:
        names = self._names()
        assert names is not None
        self._write_all([work], names)


class Kept(CachedStore):
    def __init__(self, *arguments, size: int = 1 << 24, **more):
        super().__init__(*arguments, **more)
        names = ObjectNames(b"root", b"weights")
        self.place, payloads = MemoryTier(size), Payloads(self.store.shape)
        self.names = names
        self.stored = StoreAccess(self.store, self.prefixes, payloads)
        self.query = TierQuery([Tier(self.place)])
        self.writer = AtOnce(WaitingBlocks(self.stored), [Tier(self.place)], lambda: names, NoLock())

    def find(self, ids: Sequence[int]) -> TierHit | None:
        return Search(self.stored, Budget(), self.names, ids, "").run(self.query)

    def begin(self, ids: Sequence[int]) -> CachedSequence:
        """A sequence of `ids` after what the store and the place have of it."""
        hit = self.find(ids[:-1])
        while hit is not None and hit.put_back():
            pass
        return CachedSequence(self.store, self.prefixes, ids)

    def end(self, sequence: CachedSequence) -> None:
        """Release a sequence and write its blocks."""
        length, hashes = sequence.kv.length, sequence.kv.hashes
        sequence.end()
        self.writer.keep_sequence(self.prefixes.hashes(())[0], hashes, sequence.ids[:length])


STEM = words(0, 44)  # five blocks and four tokens


def test_only_what_the_store_lacks_is_read() -> None:
    kept = Kept("polarquant")
    kept.end(kept.begin(STEM).prompt())
    assert kept.find(STEM) is None
    group = kept.store.groups[0].quantized
    group.allocate(group.size - 2)  # what was free longest, and all but the last two of the kept blocks
    hit = kept.find(STEM)
    assert [span[:2] for span in hit.spans] == [(24, 32), (32, 40)]


@pytest.mark.parametrize("times", [0, 2, 5, 6])
def test_what_is_no_longer_wanted_is_not_read(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five complete blocks and the four tokens after them are read, in threads; what was read up to a gap is found."""
    kept = Kept("polarquant")
    kept.end(kept.begin(STEM).prompt())
    overwrite(kept.store)
    _, hashes = kept.prefixes.hashes(STEM)
    answers, asked = iter([True] * times), []
    read = kept.place.read
    monkeypatch.setattr(kept.place, "read", lambda name: [asked.append(name), read(name)][1])
    monkeypatch.setattr(kept.query, "is_wanted", lambda: next(answers, False))
    hit = kept.find(STEM)
    assert len(asked) == times
    complete = next((number for number in range(5) if kept.names.block(hashes[number]) not in asked), 5)
    with_tail = complete == 5 and kept.names.tail(hashes[-1]) in asked
    assert (0 if hit is None else hit.spans[-1][1]) == (44 if with_tail else complete * N)


class Schedules(test_prefix.Schedules):
    """As those of a store alone, whose blocks are kept in a place.

    The model is the prefixes that have been kept, and the last tokens after them.
    """

    @initialize(
        windows=st.sampled_from([(None,), (12,), (None, 12)]),
        size=st.sampled_from([1 << 24, 30_000]),
        codec=st.sampled_from(["polarquant", "f16"]),
    )
    def start(self, windows, size: int, codec: str) -> None:
        self.cached = Kept(codec, windows, size=size, tokens=64, sequences=3, step_rows=N)
        self.is_exact = windows == (None,) and size > 1 << 20
        self.blocks: set[tuple[int, ...]] = set()
        self.tails: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.live: list[CachedSequence] = []

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=4), count=st.integers(2, 40))
    def begin(self, ids: list[int], count: int) -> None:
        prompt = [i for i in ids for _ in range(9)][:count]
        sequence = self.cached.begin(prompt)
        self.live.append(sequence)
        if self.is_exact and len(self.live) == 1:
            assert sequence.found >= self._kept_of(tuple(prompt[:-1]))
        self._grow(sequence, sequence.prompt)

    def _kept_of(self, ids: tuple[int, ...]) -> int:
        """How many of `ids` the model has."""
        count = 0
        while count + N <= len(ids) and ids[: count + N] in self.blocks:
            count += N
        tail = self.tails.get(ids[:count], ()) if count else ()
        common = 0
        while common < min(len(tail), len(ids) - count) and tail[common] == ids[count + common]:
            common += 1
        return count + common

    def _end(self, sequence: CachedSequence) -> None:
        self.live.remove(sequence)
        ids = tuple(sequence.ids[: sequence.kv.length])
        self.cached.end(sequence)
        self.blocks |= {ids[:stop] for stop in range(N, len(ids) + 1, N)}
        complete = len(ids) - len(ids) % N
        if complete and complete < len(ids):
            self.tails[ids[:complete]] = ids[complete:]

    @invariant()
    def a_place_keeps_to_its_size(self) -> None:
        if hasattr(self, "cached"):
            assert self.cached.place.contents.bytes <= self.cached.place._size


@mostly_slow("examples", [7, 100], [7])
def test_schedules(examples: int) -> None:
    """A hundred random schedules take half a minute."""
    run_state_machine_as_test(Schedules, settings=settings(max_examples=examples))
