"""The blocks of a prompt that were found in tiers, until they are in the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import KVStore
from polarlm.engine.storage.payloads import Payloads
from polarlm.engine.storage.tiers.adopting import Run

_LOG = logging.getLogger(__name__)
_WAITING_BYTES = 1 << 30  # most bytes of blocks that have been read for all requests in the queue together


class Budget:
    """A limit on the bytes of blocks that have been read for requests in the queue."""

    def __init__(self, size: int = _WAITING_BYTES):
        self._left = size
        self._lock = threading.RLock()  # a finalizer may give back while its thread takes

    def take(self, size: int) -> bool:
        """Take `size` bytes unless fewer are left."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


@dataclass(eq=False)
class TierHit:
    """The blocks of a prompt's prefix that tiers hold and the store lacks.

    root: the hash that the prompt's chain starts from. parts: in the order of the prompt. spans: (first position, end,
    label of the tier) of each block; tokens that have left all windows are counted with the first visible block.
    """

    store: KVStore
    prefixes: PrefixCache
    payloads: Payloads
    root: bytes
    hashes: Sequence[bytes]
    parts: list[Run] = field(default_factory=list)
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    give_back: Callable[[], None] = lambda: None

    def put_back(self) -> bool:
        """Copy the next part to the store. Returns whether any are left. The caller holds the engine's lock."""
        if not self.parts:
            return False
        self._keep()
        part = self.parts.pop(0)
        try:
            if not part.adopt(self.store, self.prefixes, self.payloads, self.root):
                self.parts.clear()
        except (MemoryError, ValueError) as error:
            _LOG.warning("blocks of a tier do not fit: %s", error)
            self.parts.clear()
        if not self.parts:
            self.give_back()
        return bool(self.parts)

    @property
    def tokens_left(self) -> int:
        """The tokens of the parts that are not in the store yet."""
        return sum(len(part.blocks) for part in self.parts) * self.store.shape.block_size

    def _keep(self) -> None:
        """Let the store reuse those of the prompt's blocks that it has later than all other free blocks."""
        for key in reversed(self.hashes):
            for group, block in zip(self.store.groups, self.prefixes.quantized(key), strict=True):
                if block is not None:
                    group.quantized.retain(block)
                    group.quantized.release(block)

    def tokens(self, length: int) -> dict[str, int]:
        """Return how many of the first `length` tokens came from each tier, by its label."""
        found: dict[str, int] = {}
        for start, stop, label in self.spans:
            if start < length:
                found[label] = found.get(label, 0) + min(stop, length) - start
        return found


def cached_from(found: TierHit | None, cached: int) -> dict[str, int]:
    """Return where `cached` tokens of a prompt came from, see `engine.outputs.Usage`."""
    tiers = {} if found is None else found.tokens(cached)
    places = {"store": cached - sum(tiers.values()), **tiers}
    return {place: tokens for place, tokens in places.items() if tokens}
