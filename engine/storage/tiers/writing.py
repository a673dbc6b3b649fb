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
from itertools import groupby
from typing import Protocol

from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.copies import groups_of, take_blocks, take_full, within
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads
from polarlm.engine.storage.tiers.circuit_breaker import CircuitBreaker
from polarlm.engine.storage.tiers.names import Names
from polarlm.model_loaders.forks import renew_in_children

_LOG = logging.getLogger(__name__)
_COPIED_BYTES = 224 << 20  # most memory of copies; blocks that are reused when it is full are not written
_AT_ONCE = 4  # blocks that are copied by one call
_HOLD = 0.002  # seconds after which no further copy begins while the engine's lock is held
_REST = 19  # pause between holds while requests are computed, in multiples of a hold: copies take a twentieth of it
_LONGEST_REST = 0.5  # seconds
_SOON = 0.03  # seconds after a request in which the next turn of its conversation may come, to be read first
_TOGETHER = 32  # most sequences that wait for the engine's lock together
_QUEUED_BYTES = 32 << 20  # most memory of the queue; further sequences replace the oldest

Key = tuple[bytes, int | tuple[int, ...]]
"""(hash, groups as bits) of quantized blocks that are written together; (hash before, token ids) of one in full
precision."""


class WaitingBlocks:
    """Reads blocks of a store, and copies those that are reused while they wait."""

    def __init__(self, store: KVStore, prefixes: PrefixCache, payloads: Payloads):
        self._store, self._prefixes, self._payloads = store, prefixes, payloads
        self.block_size, self.sparse_groups = store.shape.block_size, store.sparse_groups
        self.renew()
        prefixes.read_before_reuse(self)

    def renew(self) -> None:
        """In a forked child, forget what waits: the parent writes it."""
        self._waiting: set[Key] = set()
        self._copies: dict[Key, Object] = {}
        self._bytes = 0  # bytes of the copies
        self._is_troubled = False  # whether a copy that failed has been logged
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the store, so that it can be freed."""
        self._prefixes.read_before_reuse(None)
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
                    self._bytes -= _held(copy)

    def quantized(self, hashes: Collection[bytes], groups: int) -> list[tuple[bytes, Object]]:
        """Return the blocks of `groups`, given as bits, under these hashes, as far as they are known."""
        with self._lock:
            taken = [(key, copy) for key in hashes if (copy := self._copies.get((key, groups))) is not None]
        copied = {key for key, _ in taken}
        known = ((key, within(self._prefixes.quantized(key), groups)) for key in hashes if key not in copied)
        stored = [(key, blocks) for key, blocks in known if groups_of(blocks)]
        for _, members in groupby(stored, lambda one: groups_of(one[1])):
            keys, blocks_of = zip(*members, strict=True)
            taken += zip(keys, take_blocks(self._store, self._payloads, blocks_of), strict=True)
        return taken

    def full(self, before: bytes, ids: Sequence[int]) -> Object | None:
        """Return the full-precision block with exactly `ids` after the hash `before`; None if it is not known."""
        with self._lock:
            if (copy := self._copies.get((before, tuple(ids)))) is not None:
                return copy
        slots = self._prefixes.full(before, ids)
        return take_full(self._store, self._payloads, slots, ids) if groups_of(slots) else None

    def has_state(self, key: bytes) -> bool:
        """Whether the snapshot of recurrent layers at the end of the block with this hash is known. Needs no lock."""
        with self._lock:
            if (key, self.sparse_groups) in self._copies:
                return True
        return bool(groups_of(self._prefixes.quantized(key)) & self.sparse_groups)

    # -- called by the prefix cache ------------------------------------------------------------------------------

    def before_reuse(self, key: bytes, group: int) -> None:
        groups = self.sparse_groups if self.sparse_groups >> group & 1 else ~self.sparse_groups
        self._copy((key, groups), lambda: dict(self.quantized([key], groups)).get(key))

    def before_full_reuse(self, before: bytes, ids: Sequence[int]) -> None:
        self._copy((before, tuple(ids)), lambda: self.full(before, ids))

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
                self._bytes += _held(copy)


def _held(copy: Object) -> int:
    """At most so many bytes are held by a copy, its header, which has ids if it is in full precision, and its key."""
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


class _GivenUp(Exception):
    """The engine has been closed and its store freed."""


@dataclass(frozen=True)
class _Chain:
    """A released sequence: the hashes before it and of its complete blocks; ids of its first and its current block."""

    root: bytes
    hashes: Sequence[bytes]
    first: tuple[int, ...]
    last: tuple[int, ...]  # fewer than N

    @property
    def held(self) -> int:
        """At most so many bytes are held by the chain and its keys, two for each block."""
        return 1024 + 512 * len(self.hashes) + 48 * (len(self.first) + len(self.last))

    def keys(self, sparse_groups: int) -> set[Key]:
        quantized: set[Key] = {(key, groups) for key in self.hashes[1:] for groups in (~sparse_groups, sparse_groups)}
        return quantized | {(self.root, self.first), (self.hashes[-1], self.last)}


@dataclass(frozen=True)
class _Answer:
    key: bytes
    ids: tuple[int, ...]

    @property
    def held(self) -> int:
        """At most so many bytes are held by the answer."""
        return 512 + 48 * len(self.ids)


class Writer:
    """A thread that copies blocks out of the store, a few at a time, and writes them where they are missing."""

    def __init__(
        self, blocks: WaitingBlocks, tiers: Sequence[CircuitBreaker], names: Callable[[], Names | None], lock: Lock
    ):
        """names: waits until names are known and returns them, or None if they will not be. lock: the engine's."""
        self._blocks, self._tiers, self._names, self._lock = blocks, tiers, names, lock
        self._is_troubled = False  # whether an unexpected error has been logged
        self._closing = self._given_up = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """In a forked child, forget the thread and its queue: the parent writes these."""
        self._work: deque[_Chain | _Answer] = deque()
        self._queued = 0  # bytes of `_work`, and of what is being written
        self._blocks.renew()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._done = 0  # objects that have been written or skipped
        self._readers, self._read_at = 0, time.monotonic()  # requests that look for blocks now, and when the last came
        self._patience = _LONGEST_REST  # seconds for which the writer waits for them; writing gives it more
        self._hold_at = 0.0  # when the engine's lock may be held again while requests are computed

    @contextmanager
    def resting(self) -> Iterator[None]:
        """A context in which a request looks for blocks: an object that is being written is the last one meanwhile."""
        with self._changed:
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._read_at = time.monotonic()

    def _let_read(self) -> None:
        """Wait for requests that look for blocks, or may do so soon; half of the time if there are always some."""
        began = now = time.monotonic()
        with self._changed:
            while (left := began + self._patience - now) > 0 and not self._closing:
                if not self._readers and now > self._read_at + _SOON:
                    break
                self._changed.wait(min(left, _SOON))
                now = time.monotonic()
        self._patience -= now - began

    def released(self, root: bytes, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        """Queue the blocks of a sequence with these ids, which the prefix cache can find, for writing."""
        n = self._blocks.block_size
        if hashes:  # a shorter one is computed as fast as it is read
            chain = _Chain(root, tuple(hashes), tuple(ids[:n]), tuple(ids[len(hashes) * n :]))
            self._blocks.add(chain.keys(self._blocks.sparse_groups))
            self._put(chain)

    def keep_answer(self, key: bytes, ids: Sequence[int]) -> None:
        self._put(_Answer(key, tuple(ids)))

    def _put(self, work: _Chain | _Answer) -> None:
        with self._changed:
            if self._closing:
                return
            self._work.append(work)
            self._queued += work.held
            while self._queued > _QUEUED_BYTES and self._work:
                self._forget(self._work.popleft())
            self._read_at = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _forget(self, work: _Chain | _Answer) -> None:
        """Copy blocks of `work` no longer."""
        with self._changed:
            self._queued -= work.held
        if isinstance(work, _Chain):
            self._blocks.remove(work.keys(self._blocks.sparse_groups))

    def flush(self, patience: float) -> bool:
        """Wait until all is written, as long as there is progress every `patience` seconds. Returns whether all is."""
        done = -1
        with self._changed:
            while self._work or self._is_writing:
                if done == self._done:
                    return False
                done = self._done
                self._changed.wait_for(lambda: not (self._work or self._is_writing), patience)
        return True

    def close(self, patience: float) -> bool:
        """Flush without pauses, and end the thread. Returns whether everything has been written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        flushed = self.flush(patience)
        with self._lock.hold():
            self._given_up = True
            self._blocks.close()
        self._work.clear()
        if flushed and self._thread is not None:
            self._thread.join(patience)
        return flushed

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        names = self._names()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closing)
                if not self._work:
                    return
                works = [self._work.popleft() for _ in range(min(len(self._work), _TOGETHER))]
                self._is_writing = True
            try:
                if names is not None:
                    self._write_all(works, names)
            except _GivenUp:
                return
            except Exception as error:  # the thread continues: without it nothing would be kept
                if not (self._is_troubled or self._given_up):
                    self._is_troubled = True
                    _LOG.warning("blocks cannot be kept (%s: %s)", type(error).__name__, error)
            finally:
                for work in works:
                    self._forget(work)
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _write_all(self, works: Sequence[_Chain | _Answer], names: Names) -> None:
        self._let_read()
        first: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}  # name → the hash before it, its ids
        coded: dict[bytes, bytes] = {}  # name → hash
        states: dict[bytes, bytes] = {}
        tails: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        for work in works:
            if isinstance(work, _Answer):
                self._write(names.answer(work.key), Object({"kind": "ids", "ids": work.ids}), replaces=True)
                continue
            first[names.block(work.hashes[0])] = work.root, work.first
            coded |= ((names.block(key), key) for key in work.hashes[1:])
            states |= ((names.state(key), key) for key in work.hashes[1:] if self._blocks.has_state(key))
            if work.last:
                tails[names.tail(work.hashes[-1])] = work.hashes[-1], work.last
        dense, sparse = ~self._blocks.sparse_groups, self._blocks.sparse_groups
        takes = [partial(self._full, name, *of) for name, of in first.items() if self._is_missing(name)]
        missing = [one for one in coded.items() if self._is_missing(one[0])]
        takes += [partial(self._coded, missing[at : at + _AT_ONCE], dense) for at in range(0, len(missing), _AT_ONCE)]
        takes += [partial(self._coded, [one], sparse) for one in states.items() if self._is_missing(one[0])]
        takes += [partial(self._full, name, *of) for name, of in tails.items()]  # last: without a state it is of no use
        waiting: deque[Take] = deque(takes)
        while waiting:
            for name, block in self._copied(waiting):
                self._write(name, block, replaces=name in tails)
        for tier in self._tiers:
            tier.used([*first, *coded, *states, *tails])

    def _is_missing(self, name: bytes) -> bool:
        """Whether a tier that takes writes lacks an object."""
        self._done += 1
        return any(not tier.has(name) and tier.takes_writes for tier in self._tiers)

    def _full(self, name: bytes, before: bytes, ids: tuple[int, ...]) -> list[tuple[bytes, Object]]:
        block = self._blocks.full(before, ids)
        return [] if block is None else [(name, block)]

    def _coded(self, wanted: Sequence[tuple[bytes, bytes]], groups: int) -> list[tuple[bytes, Object]]:
        """wanted: names and hashes. groups: those to take of each block, as bits."""
        names = {key: name for name, key in wanted}
        return [(names[key], block) for key, block in self._blocks.quantized(names, groups)]

    def _copied(self, takes: deque[Take]) -> list[tuple[bytes, Object]]:
        """Take blocks from the store, and remove them from `takes`, as many as the engine's lock is held for."""
        if self._lock.is_wanted:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, max(0.0, self._hold_at - time.monotonic()))
        copied: list[tuple[bytes, Object]] = []
        with self._lock.hold():
            if self._given_up:
                raise _GivenUp
            began = now = time.monotonic()
            while takes and now < began + _HOLD:
                copied += takes.popleft()()
                now = time.monotonic()
        self._hold_at = now + min(_LONGEST_REST, _REST * (now - began))
        return copied

    def _write(self, name: bytes, block: Object, *, replaces: bool) -> None:
        """Write an object to the tiers that lack it, or to all if it replaces others of its name."""
        self._let_read()
        began = time.monotonic()
        packed = block.pack(name)
        for tier in self._tiers:
            if replaces or not tier.has(name):
                tier.write(name, *packed)
        self._patience = min(_LONGEST_REST, self._patience + time.monotonic() - began)
        self._done += 1
