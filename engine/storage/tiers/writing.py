"""Writes the blocks of released sequences to tiers, in the background. Blocks whose memory is reused meanwhile are
copied before."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.tiers.names import ObjectNames
from polarlm.engine.storage.tiers.query import Tier, TierQuery
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess, StoredBlocks
from polarlm.model_loaders.forks import renew_in_children

_LOG = logging.getLogger(__name__)
_COPIED_BYTES = 224 << 20  # most memory of copies; blocks that are reused when it is full are not written
_AT_ONCE = 4  # blocks that are copied by one call
_HOLD = 0.002  # seconds after which no further copy begins while the engine's lock is held
_PAUSE = 19  # the pause between holds while requests are computed, in holds: copies take a twentieth of the time
_LONGEST_PAUSE = 0.5  # seconds
_NEXT_TURN = 0.03  # seconds after a request in which the next turn of its conversation may come, to be read first
_MOST_SEQUENCES = 32  # most sequences that wait for the engine's lock together
_QUEUED_BYTES = 32 << 20  # most memory of the queue; further sequences replace the oldest

Key = tuple[bytes, int | tuple[int, ...]]
"""(hash, groups as bits) of quantized blocks that are written together; (hash before, token ids) of one in full
precision."""


class WaitingBlocks(StoredBlocks):
    """Reads blocks of a store, and copies those that are reused while they wait."""

    def __init__(self, access: StoreAccess):
        super().__init__(access)
        self.renew()
        self._prefixes.observe_reuse(self)

    def renew(self) -> None:
        """In a forked child, forget what waits: the parent writes it."""
        self._waiting: set[Key] = set()
        self._copies: dict[Key, Object] = {}
        self._bytes = 0  # bytes of the copies
        self._is_troubled = False  # whether a copy that failed has been logged
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the store, so that it can be freed."""
        self._prefixes.observe_reuse(None)
        del self._store, self._prefixes

    def add(self, keys: Iterable[Key]) -> None:
        """Copy the blocks with these keys if they are reused before `remove`. Needs no lock."""
        with self._lock:
            self._waiting.update(keys)

    def remove(self, keys: Iterable[Key]) -> None:
        """Forget the blocks with these keys, which have been written or will not be. Needs no lock."""
        with self._lock:
            for key in keys:
                self._waiting.discard(key)
                if (copy := self._copies.pop(key, None)) is not None:
                    self._bytes -= _nbytes(copy)

    def read_quantized(self, hashes: Collection[bytes], groups: int) -> list[tuple[bytes, Object]]:
        with self._lock:
            copies = [(key, copy) for key in hashes if (copy := self._copies.get((key, groups))) is not None]
        copied = {key for key, _ in copies}
        return copies + super().read_quantized([key for key in hashes if key not in copied], groups)

    def read_full(self, parent: bytes, ids: Sequence[int]) -> Object | None:
        with self._lock:
            copy = self._copies.get((parent, tuple(ids)))
        return copy or super().read_full(parent, ids)

    def has_state(self, key: bytes) -> bool:
        with self._lock:
            is_copied = (key, self.sparse_groups) in self._copies
        return is_copied or super().has_state(key)

    # -- called by the prefix cache ------------------------------------------------------------------------------

    def copy_before_reuse(self, key: bytes, group: int) -> None:
        groups = self.sparse_groups if self.sparse_groups >> group & 1 else ~self.sparse_groups
        self._copy((key, groups), lambda: dict(self.read_quantized([key], groups)).get(key))

    def copy_full_before_reuse(self, parent: bytes, ids: Sequence[int]) -> None:
        self._copy((parent, tuple(ids)), lambda: self.read_full(parent, ids))

    def _copy(self, key: Key, take: Callable[[], Object | None]) -> None:
        if key not in self._waiting or key in self._copies or self._bytes >= _COPIED_BYTES:
            return
        try:
            copy = take()
        except Exception as error:  # the sequence that needs the memory is computed nevertheless
            if not self._is_troubled:
                self._is_troubled = True
                _LOG.warning("a block cannot be kept (%s: %s)", type(error).__name__, error)
            return
        with self._lock:
            if copy is not None and key in self._waiting:
                self._copies[key] = copy
                self._bytes += _nbytes(copy)


def _nbytes(copy: Object) -> int:
    """The most bytes of a copy, its header, which has ids if it is in full precision, and its key."""
    return len(copy.payload) + 1536 + 48 * len(copy.header.get("ids", ()))


Take = Callable[[], list[tuple[bytes, Object]]]
"""Copies blocks of the store; returns their names and the copies."""


class Lock(Protocol):
    """The engine's lock."""

    def hold(self) -> AbstractContextManager[object]:
        """Hold the lock."""

    @property
    def is_wanted(self) -> bool:
        """Whether a thread holds the lock, or waits for it: there are requests."""


class _Closed(Exception):
    """The engine has been closed and its store freed."""


@dataclass(frozen=True)
class _Sequence:
    """A released sequence: the hashes before it and of its complete blocks; ids of its first and its current block."""

    root: bytes
    hashes: Sequence[bytes]
    first_ids: tuple[int, ...]
    last_ids: tuple[int, ...]  # fewer than N
    keep_seconds: int

    @property
    def nbytes(self) -> int:
        """The most bytes of the hashes, ids and keys, two for each block."""
        return 1024 + 512 * len(self.hashes) + 48 * (len(self.first_ids) + len(self.last_ids))

    def keys(self, sparse_groups: int) -> set[Key]:
        quantized: set[Key] = {(key, groups) for key in self.hashes[1:] for groups in (~sparse_groups, sparse_groups)}
        return quantized | {(self.root, self.first_ids), (self.hashes[-1], self.last_ids)}


@dataclass(frozen=True)
class _AnswerIds:
    key: bytes
    ids: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The most bytes of the answer."""
        return 512 + 48 * len(self.ids)


class TierWriter:
    """A thread that copies blocks out of the store, a few at a time, and writes them where they are missing."""

    def __init__(
        self,
        blocks: WaitingBlocks,
        tiers: Sequence[Tier],
        names: Callable[[], ObjectNames | None],
        lock: Lock,
    ):
        """names: waits until names are known and returns them, or None if they will not be. lock: the engine's."""
        self._blocks, self._tiers, self._names, self._lock = blocks, tiers, names, lock
        self._is_troubled = False  # whether an unexpected error has been logged
        self._is_closing = self._is_closed = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """In a forked child, forget the thread and its queue: the parent writes these."""
        self._work: deque[_Sequence | _AnswerIds] = deque()
        self._queued_bytes = 0  # bytes of `_work`, and of what is being written
        self._blocks.renew()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._progress = 0  # objects that have been written or skipped
        self._readers, self._last_read = 0, time.monotonic()  # requests that look for blocks, and when the last came
        self._patience = _LONGEST_PAUSE  # seconds for which the writer waits for them; writing gives it more
        self._next_hold = 0.0  # when the engine's lock may be held again while requests are computed

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which a request looks for blocks: an object that is being written is the last one meanwhile."""
        with self._condition:
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._last_read = time.monotonic()

    def _let_read(self) -> None:
        """Wait for requests that look for blocks, or may do so soon; half of the time if there are always some."""
        began = now = time.monotonic()
        with self._condition:
            while (left := began + self._patience - now) > 0 and not self._is_closing:
                if not self._readers and now > self._last_read + _NEXT_TURN:
                    break
                self._condition.wait(min(left, _NEXT_TURN))
                now = time.monotonic()
        self._patience -= now - began

    def keep_sequence(self, root: bytes, hashes: Sequence[bytes], ids: Sequence[int], keep_seconds: int = 0) -> None:
        """Queue the blocks of a sequence with these ids, which the prefix cache can find, for writing."""
        n = self._blocks.block_size
        if hashes:  # a shorter one is computed as fast as it is read
            sequence = _Sequence(root, tuple(hashes), tuple(ids[:n]), tuple(ids[len(hashes) * n :]), keep_seconds)
            self._blocks.add(sequence.keys(self._blocks.sparse_groups))
            self._queue(sequence)

    def keep_answer(self, key: bytes, ids: Sequence[int]) -> None:
        self._queue(_AnswerIds(key, tuple(ids)))

    def _queue(self, work: _Sequence | _AnswerIds) -> None:
        with self._condition:
            if self._is_closing:
                return
            self._work.append(work)
            self._queued_bytes += work.nbytes
            while self._queued_bytes > _QUEUED_BYTES and self._work:
                self._forget(self._work.popleft())
            self._last_read = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def _forget(self, work: _Sequence | _AnswerIds) -> None:
        """Copy blocks of `work` no longer."""
        with self._condition:
            self._queued_bytes -= work.nbytes
        if isinstance(work, _Sequence):
            self._blocks.remove(work.keys(self._blocks.sparse_groups))

    def flush(self, patience: float) -> bool:
        """Wait until all is written, as long as there is progress every `patience` seconds. Returns whether all is."""
        done = -1
        with self._condition:
            while self._work or self._is_writing:
                if done == self._progress:
                    return False
                done = self._progress
                self._condition.wait_for(lambda: not (self._work or self._is_writing), patience)
        return True

    def close(self, patience: float) -> bool:
        """Flush without pauses, and end the thread. Returns whether everything has been written."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        is_flushed = self.flush(patience)
        with self._lock.hold():
            self._is_closed = True
            self._blocks.close()
        self._work.clear()
        if is_flushed and self._thread is not None:
            self._thread.join(patience)
        return is_flushed

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        names = self._names()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._work or self._is_closing)
                if not self._work:
                    return
                works = [self._work.popleft() for _ in range(min(len(self._work), _MOST_SEQUENCES))]
                self._is_writing = True
            try:
                if names is not None:
                    self._write_all(works, names)
            except _Closed:
                return
            except Exception as error:  # the thread continues: without it nothing would be kept
                if not (self._is_troubled or self._is_closed):
                    self._is_troubled = True
                    _LOG.warning("blocks cannot be kept (%s: %s)", type(error).__name__, error)
            finally:
                for work in works:
                    self._forget(work)
                with self._condition:
                    self._is_writing = False
                    self._condition.notify_all()

    def _write_all(self, works: Sequence[_Sequence | _AnswerIds], names: ObjectNames) -> None:
        self._let_read()
        query = TierQuery(self._tiers)
        first: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}  # name → the hash before it, its ids
        quantized: dict[bytes, bytes] = {}  # name → hash
        states: dict[bytes, bytes] = {}
        tails: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        recent: set[bytes] = set()  # hashes of blocks that may have to be encoded before
        seconds_of: dict[bytes, int] = {}  # name → the most `keep_seconds` of a sequence that has it
        for work in works:
            if isinstance(work, _AnswerIds):
                self._write(query, names.answer(work.key), Object({"kind": "ids", "ids": work.ids}))
                continue
            first[names.block(work.hashes[0])] = work.root, work.first_ids
            quantized |= ((names.block(key), key) for key in work.hashes[1:])
            recent |= {*work.hashes[len(work.hashes) - self._blocks.recent_blocks :]}
            states |= ((names.state(key), key) for key in work.hashes[1:] if self._blocks.has_state(key))
            if work.last_ids:
                tails[names.tail(work.hashes[-1])] = work.hashes[-1], work.last_ids
            for name in (*map(names.block, work.hashes), *map(names.state, work.hashes), names.tail(work.hashes[-1])):
                seconds_of[name] = max(work.keep_seconds, seconds_of.get(name, 0))
        dense, sparse = ~self._blocks.sparse_groups, self._blocks.sparse_groups
        takes = [partial(self._take_full, name, *at) for name, at in first.items() if self._is_missing(query, name)]
        missing = [one for one in quantized.items() if self._is_missing(query, one[0])]
        old, new = ([one for one in missing if (one[1] in recent) is is_new] for is_new in (False, True))
        runs = [*(old[at : at + _AT_ONCE] for at in range(0, len(old), _AT_ONCE)), *([one] for one in new)]
        takes += [partial(self._take_quantized, run, dense) for run in runs]
        missing_states = [one for one in states.items() if self._is_missing(query, one[0])]
        takes += [partial(self._take_quantized, [one], sparse) for one in missing_states]
        takes += [
            partial(self._take_full, name, *block) for name, block in tails.items()
        ]  # last: without a state it is of no use
        takes_left: deque[Take] = deque(takes)
        while takes_left:
            for name, block in self._copy(takes_left):
                self._write(query, name, block)
        for seconds in {*seconds_of.values()}:
            names_of_all = [*first, *quantized, *states, *tails]
            query.touch([name for name in names_of_all if seconds_of[name] == seconds], seconds)

    def _is_missing(self, query: TierQuery, name: bytes) -> bool:
        self._progress += 1
        return query.is_lacking(name)

    def _take_full(self, name: bytes, parent: bytes, ids: tuple[int, ...]) -> list[tuple[bytes, Object]]:
        block = self._blocks.read_full(parent, ids)
        return [] if block is None else [(name, block)]

    def _take_quantized(self, blocks: Sequence[tuple[bytes, bytes]], groups: int) -> list[tuple[bytes, Object]]:
        """blocks: names and hashes. groups: those to take of each block, as bits."""
        names = {key: name for name, key in blocks}
        return [(names[key], block) for key, block in self._blocks.read_quantized(names, groups)]

    def _copy(self, takes: deque[Take]) -> list[tuple[bytes, Object]]:
        """Take blocks from the store, and remove them from `takes`, as many as the engine's lock is held for."""
        if self._lock.is_wanted:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closing, max(0.0, self._next_hold - time.monotonic()))
        copies: list[tuple[bytes, Object]] = []
        with self._lock.hold():
            if self._is_closed:
                raise _Closed
            began = now = time.monotonic()
            while takes and now < began + _HOLD:
                copies += takes.popleft()()
                now = time.monotonic()
        self._next_hold = now + min(_LONGEST_PAUSE, _PAUSE * (now - began))
        return copies

    def _write(self, query: TierQuery, name: bytes, block: Object) -> None:
        self._let_read()
        began = time.monotonic()
        query.write(name, *block.pack(name))
        self._patience = min(_LONGEST_PAUSE, self._patience + time.monotonic() - began)
        self._progress += 1
