"""Blocks that wait to be written to tiers, and are copied in time if their memory is reused before. The caller of every
method holds the engine's lock, unless it says otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.copies import groups_of, take_blocks, take_full, within
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads

_LOG = logging.getLogger(__name__)
_COPIED_BYTES = 224 << 20  # most memory of copies; blocks that are reused when it is full are not written

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
