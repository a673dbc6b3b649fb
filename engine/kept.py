"""Finished sequences whose K/V stay in the store, so that a next turn prefills only what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.kv.blocks import OutOfBlocks
from engine.kv.store import KVStore, SequenceKV, Span


class KeptSequences:
    """At most `limit` finished sequences, the least recently used ones given up first."""

    def __init__(self, store: KVStore, limit: int):
        self._store = store
        self._limit = limit
        self._kept: OrderedDict[tuple[int, ...], SequenceKV] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def newest(self) -> SequenceKV | None:
        return next(reversed(self._kept.values()), None)

    def add(self, ids: Sequence[int], kv: SequenceKV) -> None:
        """Keep a sequence whose first kv.length tokens are those of `ids`; it replaces what it extends."""
        ids = tuple(ids[: kv.length])
        for other in [other for other in self._kept if ids[: len(other)] == other]:
            self._store.release(self._kept.pop(other))
        if not ids:
            self._store.release(kv)
            return
        self._kept[ids] = kv
        while len(self._kept) > self._limit:
            self.evict()

    def evict(self) -> bool:
        """Give up the least recently used sequence; False if there is none."""
        if not self._kept:
            return False
        _, kv = self._kept.popitem(last=False)
        self._store.release(kv)
        return True

    def clear(self) -> None:
        while self.evict():
            pass

    def resume(self, ids: Sequence[int]) -> SequenceKV:
        """A sequence that holds as much of `ids` as a kept one has in common with it, all but the last at most."""
        best, best_length = None, 0
        for kept, kv in self._kept.items():
            length = self._store.forkable(kv, min(_common(kept, ids), len(ids) - 1))
            if length > best_length:
                best, best_length = kept, length
        if best is None:
            return self._store.new_sequence()
        self._kept.move_to_end(best)
        if best_length == len(best):  # the whole of it goes on: no copy of its tail is needed
            return self._kept.pop(best)
        while True:
            try:
                return self._store.fork(self._kept[best], best_length)
            except OutOfBlocks:
                self.evict()
                if not self._kept:  # the last to go is `best`, as the newest
                    return self._store.new_sequence()

    def open(self, kv: SequenceKV, count: int, *, now_as_codes: bool = False) -> Span:
        """`KVStore.open`, giving up kept sequences as long as room is short. Raises OutOfBlocks when none is left."""
        while True:
            try:
                return self._store.open(kv, count, now_as_codes=now_as_codes)
            except OutOfBlocks:
                if not self.evict():
                    raise


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
