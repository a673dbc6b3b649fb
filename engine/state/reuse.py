"""Which blocks of ended sequences are reused first.

Those that have been free the longest are, which is right while conversations come back soon. Where more conversations
than fit take turns in a circle, it is the worst choice: each is overwritten just before its turn. Then blocks that were
released last are reused first, so that as many conversations as fit stay where they are.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from polarlm.engine.state.store import KVStore

_LATEST = 16  # conversations that came back, which decide
_FEWEST = 4  # of these, before they decide anything
_LATE = 4  # returns are late if fewer than one of so many came soon enough
_REMEMBERED = 8  # blocks that are remembered at most, in multiples of the store's


class ReuseOrder:
    """Chooses the order for all allocators of a store, by when conversations came back."""

    def __init__(self, store: KVStore) -> None:
        self._returns = Returns(store.plan.capacity // store.shape.block_size)
        self._allocators = [allocator for group in store.groups for allocator in (group.quantized, group.full)]

    def came(self, hashes: Sequence[bytes]) -> None:
        """A prompt with these complete blocks looks for them; again for the same prompt changes nothing."""
        self._returns.came(hashes)
        self._choose()

    def released(self, hashes: Sequence[bytes], *, continues: bool) -> None:
        """A sequence with these complete blocks has just been released. continues: as for `PrefixCache.release`."""
        if continues:
            for allocator in self._allocators:
                allocator.reuse_last()
            return
        self._returns.released(hashes)
        self._choose()

    def _choose(self) -> None:
        for allocator in self._allocators:
            allocator.newest_first = self._returns.are_late


class Returns:
    """Measures how much was released between a conversation's end and its next turn, whether or not it was found.

    Time is the number of blocks of released sequences. Blocks that sequences have in common, such as those of a system
    prompt, count once. `released` and `came` cost O(blocks of the sequence).
    """

    def __init__(self, blocks: int) -> None:
        """blocks: how many the store has."""
        self._blocks, self._time = blocks, 0
        self._released: OrderedDict[bytes, int] = OrderedDict()  # when a block was last part of a released sequence
        self._ended: OrderedDict[bytes, int] = OrderedDict()  # when a sequence with this last block was released
        self._came: set[bytes] = set()  # those of `_ended` whose next turn has come
        self._soon: deque[bool] = deque(maxlen=_LATEST)

    @property
    def are_late(self) -> bool:
        """Whether most conversations come back later than a store that reuses the oldest blocks first can keep them."""
        return len(self._soon) >= _FEWEST and _LATE * sum(self._soon) < len(self._soon)

    def came(self, hashes: Sequence[bytes]) -> None:
        """Take note of a prompt with these complete blocks; again for the same prompt changes nothing."""
        end = self._end(hashes)
        if end is not None and end not in self._came:
            self._came.add(end)
            self._soon.append(self._time - self._ended[end] + len(hashes) <= self._blocks)

    def released(self, hashes: Sequence[bytes]) -> None:
        """Take note of a released sequence with these complete blocks."""
        if not hashes:
            return
        end = self._end(hashes)
        before = -1 if end is None else self._ended[end]  # the same conversation's
        self._time += sum(self._released.get(key, before) <= before for key in hashes)
        for key in hashes:
            self._released[key] = self._time
            self._released.move_to_end(key)
        self._ended[hashes[-1]] = self._time
        self._ended.move_to_end(hashes[-1])
        self._came.discard(hashes[-1])
        while len(self._released) > _REMEMBERED * self._blocks:
            self._released.popitem(last=False)
        while len(self._ended) > _REMEMBERED * self._blocks:
            self._came.discard(self._ended.popitem(last=False)[0])

    def _end(self, hashes: Sequence[bytes]) -> bytes | None:
        """Return the last of these blocks with which a sequence has ended."""
        return next((key for key in reversed(hashes) if key in self._ended), None)
