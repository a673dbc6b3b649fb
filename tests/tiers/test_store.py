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
from polarlm.engine.storage.tiers.writing import TierWriter, WaitingBlocks
from tests.pairs import mostly_slow
from tests.state import test_prefix
from tests.state.fed import N, overwrite
from tests.state.test_prefix import CachedSequence, CachedStore, words


class NoLock:
    """For a single thread."""

    is_wanted = False

    def hold(self) -> nullcontext[None]:
        return nullcontext()


class AtOnce(TierWriter):
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
    """The four tokens after five complete blocks are read, then these; what was read up to a gap is found."""
    kept = Kept("polarquant")
    kept.end(kept.begin(STEM).prompt())
    overwrite(kept.store)
    asked, read, kept.place.readers = [], kept.place.read, 1

    def count(name: bytes) -> bytes | None:
        asked.append(name)
        if len(asked) == times:
            kept.query.end()
        return read(name)

    monkeypatch.setattr(kept.place, "read", count)
    if not times:
        kept.query.end()
    hit = kept.find(STEM)
    assert len(asked) == times
    assert (0 if hit is None else hit.spans[-1][1]) == (44 if times == 6 else max(0, times - 1) * N)


@pytest.mark.parametrize("readers", [1, 3, 16])
def test_several_blocks_are_looked_up_at_a_time(readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few rounds of as many as a tier is read by."""
    kept, rounds = Kept("polarquant", tokens=600), []
    long, in_threads = words(0, 40 * N + 1), Search._in_threads
    kept.end(kept.begin(long[: 21 * N]).prompt())
    overwrite(kept.store)
    kept.place.readers = readers
    monkeypatch.setattr(Search, "_in_threads", lambda *args: [rounds.append(len(args[2])), in_threads(*args)][1])
    hit = kept.find(long)
    assert hit.spans[-1][1] == 21 * N
    *lookups, blocks = rounds
    assert blocks == 21
    assert max(lookups) <= readers
    assert len(lookups) <= {1: 6, 3: 4, 16: 2}[readers]


class Schedules(test_prefix.Schedules):
    """As those of a store alone, whose blocks are kept in a place.

    The model is the prefixes that have been kept, and the last tokens after them.
    """

    @initialize(
        windows=st.sampled_from([(None,), (12,), (None, 12)]),
        size=st.sampled_from([1 << 24, 30_000]),
        codec=st.sampled_from(["polarquant", "f16"]),
        readers=st.sampled_from([1, 16]),
    )
    def start(self, windows, size: int, codec: str, readers: int) -> None:
        self.cached = Kept(codec, windows, size=size, tokens=64, sequences=5)
        self.cached.place.readers = readers
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
