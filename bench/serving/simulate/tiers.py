"""The tiers that can have keys and values: a machine's store, host memory and disk, and a remote store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

STORE = 0
NAMES = ("store", "ram", "disk", "remote")


@dataclass(frozen=True)
class TierSize:
    """A tier's capacity in tokens, and the speed of transfers to the store."""

    tokens: float
    tokens_per_second: float = float("inf")
    latency: float = 0.0  # seconds


class Tier:
    """An LRU cache of a given capacity. Conversations and system prompts are kept or evicted as a whole."""

    __slots__ = ("capacity", "kept", "pinned", "used")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.kept: OrderedDict[int, int] = OrderedDict()  # key → tokens, least recently used first
        self.used = 0  # tokens, with pinned ones
        self.pinned = 0  # tokens of running requests

    def put(self, key: int, tokens: int) -> list[tuple[int, int]]:
        """Add or replace `key` as the most recently used; returns the evicted (key, tokens)."""
        self.used += tokens - self.kept.pop(key, 0)
        self.kept[key] = tokens
        return self.shrink()

    def shrink(self) -> list[tuple[int, int]]:
        """Evict the least recently used until the rest fits; returns the evicted (key, tokens)."""
        gone = []
        while self.used > self.capacity and self.kept:
            key, tokens = self.kept.popitem(last=False)
            self.used -= tokens
            gone.append((key, tokens))
        return gone

    def pop(self, key: int) -> None:
        self.used -= self.kept.pop(key, 0)


class Tiers:
    """The tiers of one machine, and the remote one that all share. A machine has a key in at most one of its tiers."""

    __slots__ = ("_local", "_remote", "store")

    def __init__(self, sizes: Sequence[TierSize], remote: Tier | None) -> None:
        """sizes: of the store, host memory and disk."""
        self._local = [Tier(size.tokens) for size in sizes]
        self._remote = remote
        self.store = self._local[STORE]

    def find(self, key: int) -> tuple[int, int]:
        """(index of the fastest tier that has `key`, its tokens); (-1, 0) if none has it."""
        for level, tier in enumerate(self._local):
            tokens = tier.kept.get(key)
            if tokens is not None:
                return level, tokens
        if self._remote is not None and (tokens := self._remote.kept.get(key)) is not None:
            return len(NAMES) - 1, tokens
        return -1, 0

    def put(self, key: int, tokens: int) -> None:
        """Put `key` into the store as the most recently used. Evicted keys move to the next tier."""
        for tier in self._local[1:]:
            tier.pop(key)
        self._move_down(self.store.put(key, tokens))

    def share(self, key: int, tokens: int) -> None:
        """Put `key` into the remote tier, too."""
        if self._remote is not None:
            self._remote.put(key, tokens)

    def pin(self, key: int, tokens: int) -> None:
        """Take `tokens` of the store for a request that continues `key`, which is in no local tier meanwhile."""
        for tier in self._local:
            tier.pop(key)
        self.store.pinned += tokens
        self.store.used += tokens
        self._move_down(self.store.shrink())

    def unpin(self, key: int, tokens: int) -> None:
        """Release a request's tokens; `key` with them can be found from now on."""
        self.store.pinned -= tokens
        self.store.used -= tokens
        self.put(key, tokens)

    def _move_down(self, gone: list[tuple[int, int]]) -> None:
        for tier in self._local[1:]:
            gone = [lower for key, tokens in gone for lower in tier.put(key, tokens)]
