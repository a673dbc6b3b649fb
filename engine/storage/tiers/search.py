"""Finds the blocks of a prompt in tiers. Needs no lock, as `lookup`."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from threading import Event, Thread, current_thread
from typing import Any

from polarlm.engine.state.blocks import Blocks
from polarlm.engine.storage.objects import DamagedObject, Object
from polarlm.engine.storage.tiers.adopting import FoundBlock, Run
from polarlm.engine.storage.tiers.lookup import Lookup
from polarlm.engine.storage.tiers.names import Names
from polarlm.engine.storage.tiers.tier_hit import TierHit

_READERS = 3  # threads that read blocks while a search reads what follows them
_RUN_BYTES = 8 << 20  # most bytes that are copied to the store in one unit of work, unless one block has more


def find(lookup: Lookup, names: Names, ids: Sequence[int], salt: str, wanted: Callable[[], bool]) -> TierHit | None:
    """Return the blocks of the longest prefix of `ids` that tiers hold and the store lacks; None if none.

    wanted: called before each read; once it returns False, nothing more is read.
    """
    root, hashes = lookup.prefixes.hashes(ids, salt)
    return _Search(lookup, names, ids, root, hashes, wanted).run()


@dataclass
class _Tail:
    """A block with fewer than N tokens after the complete ones. common: how many of its first tokens the prompt has."""

    block: Object
    ids: Sequence[int]
    common: int
    label: str


@dataclass
class _Search:
    """The search for the blocks of one prompt. root: the hash that its chain, `hashes`, starts from."""

    lookup: Lookup
    names: Names
    ids: Sequence[int]
    root: bytes
    hashes: Sequence[bytes]
    wanted: Callable[[], bool]
    taken: list[int] = field(default_factory=list)  # bytes of the budget
    unread: set[int] = field(default_factory=set)  # counts of blocks after which a snapshot could not be read
    begun: set[int] = field(default_factory=set)  # complete blocks that are being read, or have been
    read: dict[int, tuple[Object, str]] = field(default_factory=dict)  # complete blocks that have been read
    beyond: dict[int, tuple[Object, str]] = field(default_factory=dict)  # those for which the budget had no bytes left
    readers: list[Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._store, self._prefixes = self.lookup.store, self.lookup.prefixes
        self._n, self._sparse = self._store.shape.block_size, self._store.sparse_groups

    def run(self) -> TierHit | None:
        state: tuple[Object, str] | None = None
        while True:
            count, tail, length = self._longest()
            if length % self._n or not count or self._stores_state(count):
                break
            state = self._state(count) if self.wanted() else None
            if state is not None and self._claim(state[0]):
                break
            self.unread.add(count)
        found = TierHit(self._store, self._prefixes, self.lookup.payloads, self.root, self.hashes[:count])
        budget, taken = self.lookup.budget, self.taken
        found.give_back = weakref.finalize(found, lambda: budget.give_back(sum(taken)))
        self._read_blocks(count, length)
        for reader in self.readers:
            reader.join()
        held: list[tuple[int, Object, str]] = []
        for number in range(count):
            if not self._lacks(number, length):
                continue
            self._claim_instead_of_later(number)
            read, needed = self.read.get(number), self._needed(number, length)
            if read is None or read[0].groups & needed != needed:
                count, tail, state, length = number, None, None, number * self._n  # later blocks are of no use
                break
            held.append((number, *read))
        self._add_blocks(found, held, length)
        if state is not None:
            found.parts.append(Run([self._found(count - 1, state[0])], state[0].groups))
        if tail is not None and self._claim(tail.block):
            found.parts.append(Run([FoundBlock(self.hashes[count - 1], None, tail.ids, tail.block)], tail.block.groups))
            found.spans.append((count * self._n, count * self._n + len(tail.ids), tail.label))
        return found if found.parts else None

    # -- how long it is ----------------------------------------------------------------------------------------

    def _longest(self) -> tuple[int, _Tail | None, int]:
        """Return how many complete blocks the store and tiers may hold together, the tail after them, and all tokens.

        No missing block is visible to the next token. (A longer tail may move one out of every window.)
        """
        runs = self._runs()
        for follow in (self._n - 1, 0):
            count = max((c for c, run in enumerate(runs) if run >= c - self._first(c * self._n + follow)), default=0)
            self._read_blocks(count, count * self._n + follow)
            tail, common = self._tail(count)
            length = count * self._n + common
            if runs[count] >= count - self._first(length) and (common or self._has_state(count)):
                return count, tail, length
        counts = (c for c in reversed(range(len(runs))) if runs[c] >= c - self._first(c * self._n))
        count = next((c for c in counts if self._has_state(c)), 0)
        return count, None, count * self._n

    def _has_state(self, count: int) -> bool:
        """Whether the store or a tier has the snapshots at the end of the first `count` blocks, if there are such."""
        if self._stores_state(count):
            return True
        return count not in self.unread and self.lookup.has(self.names.state(self.hashes[count - 1]))

    def _stores_state(self, count: int) -> bool:
        """Whether nothing has to be read for sparse groups to continue after `count` blocks."""
        if not count or not self._sparse:
            return True
        return not self._store_lacks(count - 1, self._sparse)

    def _state(self, count: int) -> tuple[Object, str] | None:
        """Return the object of the snapshots after `count` blocks, and its tier's label; None if no tier has it."""

        def check(found: Object) -> None:
            self.lookup.payloads.check_block(found)
            if found.groups != self._sparse:
                raise DamagedObject("it is another object")

        return self.lookup.read(self.names.state(self.hashes[count - 1]), check)

    def _runs(self) -> list[int]:
        """Return, as [i], the length of the run of blocks in the store or in tiers that ends with block i − 1.

        Tiers evict the last blocks of a conversation first, so the end of a run is found by bisection, with few
        requests; a block before it that is missing after all ends it when it is read. Blocks that have left all
        windows may be missing: then each is looked up.
        """
        if self._first(len(self.ids)) > 0:
            runs = [0]
            for number in range(len(self.hashes)):
                runs.append(runs[-1] + 1 if self._is_there(number) else 0)
            return runs
        end = bisect_left(range(len(self.hashes)), True, key=lambda number: not self._is_there(number))
        return list(range(end + 1))

    def _is_there(self, number: int) -> bool:
        """Whether the store or a tier has complete block `number`."""
        known = self.lookup.has_dense(self._known(number))
        return known or self.lookup.has(self.names.block(self.hashes[number]))

    def _known(self, number: int) -> Blocks:
        return self.lookup.known(self.root, self.hashes, self.ids, number)

    def _store_lacks(self, number: int, needed: int) -> bool:
        return any(block is None and needed >> index & 1 for index, block in enumerate(self._known(number)))

    def _needed(self, number: int, length: int) -> int:
        """Return the groups, as bits, in which the token after `length` tokens sees block `number`, but sparse ones."""
        groups = enumerate(self._store.groups)
        return sum(1 << i for i, group in groups if number >= group.first_visible(length) and not group.is_sparse)

    def _first(self, length: int) -> int:
        """Return the number of the first block that the token after `length` tokens sees, in groups that have all."""
        return min(group.first_visible(length) for group in self._store.groups if not group.is_sparse)

    # -- reading -----------------------------------------------------------------------------------------------

    def _claim(self, block: Object) -> bool:
        """Take a block's bytes from the budget; False if they are not left."""
        size = len(block.payload)
        if not self.lookup.budget.take(size):
            return False
        self.taken.append(size)
        return True

    def _claim_instead_of_later(self, number: int) -> None:
        """If the budget had no bytes left for block `number`, take those of later blocks, which were read before it."""
        if number not in self.beyond:
            return
        found = self.beyond.pop(number)
        while not self._claim(found[0]):
            last = max(self.read, default=-1)
            if last < number:
                return
            size = len(self.read.pop(last)[0].payload)
            self.taken.remove(size)
            self.lookup.budget.give_back(size)
        self.read[number] = found

    def _read_blocks(self, count: int, length: int) -> None:
        """Begin to read those of the first `count` blocks that the store lacks and a token after `length` tokens sees.

        Most of the time goes to waiting for an answer, and to checksums, which need no lock of Python.
        """
        numbers = [number for number in range(count) if number not in self.begun and self._lacks(number, length)]
        self.begun.update(numbers)
        left, search, ended = iter(numbers), current_thread(), Event()

        def read() -> None:
            with self.lookup.asking(search):
                for number in left:  # a thread takes a number that no other one takes
                    found = self._block(number) if self.wanted() and not ended.is_set() else None
                    if found is not None and self._claim(found[0]):
                        self.read[number] = found
                        continue
                    if found is not None:
                        self.beyond[number] = found
                    ended.set()  # later blocks are of no use
                    return

        readers = [Thread(target=read, name="tiers reading", daemon=True) for _ in numbers[:_READERS]]
        for reader in readers:
            reader.start()
        self.readers += readers

    def _lacks(self, number: int, length: int) -> bool:
        """Whether the token after `length` tokens sees block `number` in groups, but sparse ones, that lack it."""
        needed = self._needed(number, length)
        return bool(needed) and self._store_lacks(number, needed)

    def _block(self, number: int) -> tuple[Object, str] | None:
        """Return the object of a complete block, and the label of its tier; None if no tier has it."""
        payloads = self.lookup.payloads

        def check(found: Object) -> None:
            if number:
                payloads.check_block(found)
            elif payloads.check_full(found) != tuple(self.ids[: self._n]):
                raise DamagedObject("it has other tokens")

        return self.lookup.read(self.names.block(self.hashes[number]), check)

    def _tail(self, count: int) -> tuple[_Tail | None, int]:
        """Return the incomplete block after `count` complete ones, and how many of its first tokens are the prompt's.

        The block is None if no tier has one, or if the store has one, whose tokens are then counted.
        """
        rest = self.ids[count * self._n : (count + 1) * self._n]
        if not count or not rest:
            return None, 0
        before = self.hashes[count - 1]
        if common := self._prefixes.common(before, rest):
            return None, common
        name, payloads = self.names.tail(before), self.lookup.payloads
        read = self.lookup.read(name, payloads.check_full) if self.wanted() else None
        if read is None or read[0].groups != payloads.every_group:
            return None, 0
        own = read[0].ids
        both = zip(own, rest, strict=False)
        common = next((i for i, (a, b) in enumerate(both) if a != b), min(len(own), len(rest)))
        is_of_use = common == len(own) or all(group.can_cut for group in self._store.groups)
        return (_Tail(read[0], own, common, read[1]), common) if common and is_of_use else (None, 0)

    # -- parts -------------------------------------------------------------------------------------------------

    def _add_blocks(self, found: TierHit, held: Sequence[tuple[int, Object, str]], length: int) -> None:
        """Add the complete blocks that were read to `found`. Consecutive blocks of one format are one part."""
        n = self._n
        for number, _, label in held:
            found.spans.append((number * n if number > self._first(length) else 0, (number + 1) * n, label))

        def kind(one: tuple[int, tuple[int, Object, str]]) -> tuple[Any, ...]:
            index, (number, block, _) = one
            most = max(1, _RUN_BYTES // len(block.payload))
            return self._needed(number, length) & block.groups, number - index, block.header, index // most

        for (needed, *_), members in groupby(enumerate(held), kind):
            if needed:
                found.parts.append(Run([self._found(number, block) for _, (number, block, _) in members], needed))

    def _found(self, number: int, block: Object) -> FoundBlock:
        before = self.hashes[number - 1] if number else self.root
        return FoundBlock(before, self.hashes[number], self.ids[number * self._n : (number + 1) * self._n], block)
