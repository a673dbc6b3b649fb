"""How fast blocks are written while requests are computed, by a clock that only waiting and work move; and how much
memory is held meanwhile."""

from __future__ import annotations

import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.tiers import writing
from polarlm.engine.storage.tiers.names import ObjectNames
from polarlm.engine.storage.tiers.query import Tier
from polarlm.engine.storage.tiers.writing import TierWriter
from tests.state.fed import overwrite
from tests.state.test_prefix import words
from tests.tiers.test_store import Kept

UNIT, COPY, OBJECT = 0.006, 0.0001, 0.001  # seconds of a unit of a request, of copying blocks, of writing an object
BLOCKS = 4  # complete ones of a sequence


class Busy:
    """The clock, the lock, the store and the tier of an engine that always computes, and for which someone always
    reads blocks. Sequences come at these times."""

    is_wanted, label, place = True, "ram", "ram"
    block_size, sparse_groups, recent_blocks = 64, 2, 4

    def __init__(self, times: Sequence[float]):
        self.now, self.held, self.due = 0.0, 0.0, deque(times)
        self.kept: dict[bytes, float] = {}
        self.writer = TierWriter(self, [Tier(self)], lambda: ObjectNames(b"root", b"weights"), self)  # type: ignore[arg-type,list-item]
        self.writer._condition = self  # type: ignore[assignment]
        self.writer._readers, self.writer._thread = 1, threading.current_thread()
        self.count = 0

    def monotonic(self) -> float:
        return self.now

    @contextmanager
    def hold(self) -> Iterator[None]:
        self.now += UNIT  # the lock is free when the unit ends
        began = self.now
        yield
        self.held += self.now - began

    # -- what the writer waits for

    def __enter__(self) -> None:
        while self.due and self.due[0] <= self.now:
            self.due.popleft()
            self.count += 1
            self.writer.keep_sequence(b"root", [b"%d %d" % (self.count, block) for block in range(BLOCKS)], [0] * 300)

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def wait_for(self, is_done: Callable[[], object], seconds: float | None = None) -> None:
        if seconds is not None:
            self.now += seconds
        elif self.due and not is_done():
            self.now = max(self.now, self.due[0])
            self.__enter__()
        elif not is_done():
            self.writer._is_closing = True

    def notify_all(self) -> None:
        pass

    # -- the blocks of the store, and the tier

    def add(self, keys: object) -> None:
        pass

    remove = touch = add

    def renew(self) -> None:
        pass

    def has_state(self, key: bytes) -> bool:
        return key.endswith(b" %d" % (BLOCKS - 1))

    def read_quantized(self, hashes: Sequence[bytes], groups: int) -> list[tuple[bytes, Object]]:
        self.now += COPY
        return [(key, Object({})) for key in hashes]

    def read_full(self, before: bytes, ids: Sequence[int]) -> Object:
        self.now += COPY
        return Object({})

    def has(self, name: bytes) -> bool:
        return name in self.kept

    def write(self, name: bytes, header: bytes, payload: memoryview) -> None:
        self.now += OBJECT
        self.kept[name] = self.now


def test_sixty_sequences_a_second_are_kept_within_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [number / 60 for number in range(1800)]
    busy = Busy(times)
    monkeypatch.setattr(writing, "time", busy)
    busy.writer._run()
    names = ObjectNames(b"root", b"weights")
    late = max(busy.kept[names.tail(b"%d %d" % (number + 1, BLOCKS - 1))] - at for number, at in enumerate(times))
    assert len(busy.kept) == len(times) * (BLOCKS + 2)  # with a snapshot and an incomplete block of each
    assert late < 10
    assert busy.held < busy.now / 20


def test_no_more_memory_is_held_than_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sequences that wait, and copies of their blocks, whose memory has been used again."""
    monkeypatch.setattr(writing, "_QUEUED_BYTES", 40_000)
    kept = Kept("polarquant", tokens=256)
    kept.writer._queue = lambda work: TierWriter._queue(kept.writer, work)  # type: ignore[method-assign]
    kept.writer._thread = threading.current_thread()
    tracemalloc.start()
    try:
        for seed in range(12):
            kept.end(kept.begin(words(seed, 44)).prompt())
            overwrite(kept.store)
        filled = tracemalloc.get_traced_memory()[0]
        blocks, queued = kept.writer._blocks, kept.writer._queued_bytes
        counted = blocks._bytes + queued
        assert 0 < len(kept.writer._work) < 12  # the oldest have been dropped, and their copies
        assert len(blocks._copies) == 6 * len(kept.writer._work)
        while kept.writer._work:
            kept.writer._forget(kept.writer._work.popleft())
        assert (blocks._waiting, blocks._copies, blocks._bytes, kept.writer._queued_bytes) == (set(), {}, 0, 0)
        assert filled - tracemalloc.get_traced_memory()[0] <= counted
    finally:
        tracemalloc.stop()
