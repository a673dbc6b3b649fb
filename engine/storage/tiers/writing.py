"""Writes the blocks of released sequences to tiers, in the background; their memory may be reused meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from polarlm.engine.storage.objects import pack_ids
from polarlm.engine.storage.tiers.circuit_breaker import CircuitBreaker
from polarlm.engine.storage.tiers.names import Names
from polarlm.engine.storage.waiting import Key, WaitingBlocks
from polarlm.model_loaders.forks import renew_in_children

_LOG = logging.getLogger(__name__)
_AT_ONCE = 4  # blocks that are copied each time that the engine's lock is held
_REST = 19  # pause after a copy while requests are computed, in multiples of its time: copies take a twentieth of it
_LONGEST_REST = 0.5  # seconds
_SOON = 0.03  # seconds after a request in which the next turn of its conversation may come, to be read first
_CHAINS = 256  # most chains in the queue; further ones replace the oldest


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
    first: Sequence[int]
    last: Sequence[int]  # fewer than N

    def keys(self, sparse_groups: int) -> set[Key]:
        """Return the keys of the blocks of the chain."""
        quantized: set[Key] = {(key, groups) for key in self.hashes[1:] for groups in (~sparse_groups, sparse_groups)}
        return quantized | {(self.root, tuple(self.first)), (self.hashes[-1], tuple(self.last))}


class Writer:
    """A thread that copies blocks out of the store, a few at a time, and writes them where they are missing."""

    def __init__(
        self,
        blocks: WaitingBlocks,
        tiers: Sequence[CircuitBreaker],
        names: Callable[[], Names | None],
        lock: Lock,
    ):
        """names: waits until names are known and returns them, or None if they will not be. lock: the engine's."""
        self._blocks, self._tiers, self._names, self._lock = blocks, tiers, names, lock
        self._is_troubled = False  # whether an unexpected error has been logged
        self._closing = self._given_up = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """In a forked child, forget the thread and its queue: the parent writes these."""
        self._work: deque[_Chain | tuple[bytes, Sequence[int]]] = deque()
        self._blocks.renew()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._done = 0  # objects that have been written or skipped
        self._readers, self._read_at = 0, time.monotonic()  # requests that look for blocks now, and when the last came

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
        """Wait for requests that look for blocks, or may do so soon."""
        until = time.monotonic() + _LONGEST_REST
        with self._changed:
            while (now := time.monotonic()) < until and not self._closing:
                if not self._readers and now > self._read_at + _SOON:
                    return
                self._changed.wait(_SOON)

    def released(self, root: bytes, hashes: Sequence[bytes], ids: Sequence[int]) -> None:
        """Queue the blocks of a sequence with these ids, which the prefix cache can find, for writing."""
        n = self._blocks.block_size
        if hashes:  # a shorter one is computed as fast as it is read
            chain = _Chain(root, tuple(hashes), tuple(ids[:n]), tuple(ids[len(hashes) * n :]))
            self._blocks.add(chain.keys(self._blocks.sparse_groups))
            self._put(chain)

    def keep_answer(self, key: bytes, ids: Sequence[int]) -> None:
        """Queue the ids of an answer for writing."""
        self._put((key, tuple(ids)))

    def _put(self, work: _Chain | tuple[bytes, Sequence[int]]) -> None:
        with self._changed:
            if self._closing:
                return
            if len(self._work) == _CHAINS:
                self._forget(self._work.popleft())
            self._work.append(work)
            self._read_at = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _forget(self, work: _Chain | tuple[bytes, Sequence[int]]) -> None:
        """Copy blocks of `work` no longer."""
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
                work, self._is_writing = self._work.popleft(), True
            try:
                if names is None:
                    continue
                if isinstance(work, _Chain):
                    self._write_chain(work, names)
                else:
                    key, ids = work
                    name = names.answer(key)
                    self._write(name, *pack_ids(name, ids), replaces=True)
            except _GivenUp:
                return
            except Exception as error:  # the thread continues: without it nothing would be kept
                if not self._is_troubled:
                    self._is_troubled = True
                    _LOG.warning("blocks cannot be kept: %r", error)
            finally:
                self._forget(work)
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _write_chain(self, chain: _Chain, names: Names) -> None:
        self._let_read()
        quantized = [(key, names.block(key)) for key in chain.hashes[1:]]
        first = names.block(chain.hashes[0])
        tail = names.tail(chain.hashes[-1])
        if self._is_missing(first):
            self._write_full(first, chain.root, chain.first)
        missing = [(key, name) for key, name in quantized if self._is_missing(name)]
        for start in range(0, len(missing), _AT_ONCE):
            self._write_blocks(missing[start : start + _AT_ONCE], ~self._blocks.sparse_groups)
        states = self._states(chain.hashes[1:], names)
        for one in states:
            if self._is_missing(one[1]):
                self._write_blocks([one], self._blocks.sparse_groups)
        if chain.last:
            self._write_full(tail, chain.hashes[-1], chain.last, replaces=True)
        known = [first, *(name for _, name in [*quantized, *states]), *([tail] if chain.last else [])]
        for tier in self._tiers:
            tier.used(known)

    def _is_missing(self, name: bytes) -> bool:
        """Whether a tier that takes writes lacks an object."""
        self._done += 1
        return any(not tier.has(name) and tier.takes_writes for tier in self._tiers)

    def _states(self, hashes: Sequence[bytes], names: Names) -> list[tuple[bytes, bytes]]:
        """Return the hashes of blocks at whose end there is a snapshot, and the snapshots' names."""
        if not self._blocks.sparse_groups:
            return []
        with self._brief():
            return [(key, names.state(key)) for key in hashes if self._blocks.has_state(key)]

    def _write_blocks(self, missing: Sequence[tuple[bytes, bytes]], groups: int) -> None:
        """Write the blocks with these hashes under these names. groups: those to take of each block, as bits."""
        names = dict(missing)
        with self._brief():
            copied = self._blocks.quantized(names, groups)
        for key, block in copied:
            self._write(names[key], *block.pack(names[key]))

    def _write_full(self, name: bytes, before: bytes, ids: Sequence[int], *, replaces: bool = False) -> None:
        with self._brief():
            block = self._blocks.full(before, ids)
        if block is not None:
            self._write(name, *block.pack(name), replaces=replaces)

    @contextmanager
    def _brief(self) -> Iterator[None]:
        """Hold the engine's lock, and pause afterwards while requests are computed."""
        with self._lock.hold():
            if self._given_up:
                raise _GivenUp
            began = time.perf_counter()
            yield
            seconds = time.perf_counter() - began
        if self._lock.is_wanted:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, min(_LONGEST_REST, _REST * seconds))

    def _write(self, name: bytes, header: bytes, payload: memoryview, *, replaces: bool = False) -> None:
        """Write an object to the tiers that lack it, or to all if it replaces others of its name."""
        self._let_read()
        for tier in self._tiers:
            if replaces or not tier.has(name):
                tier.write(name, header, payload)
        self._done += 1
