"""Finds the blocks of a prompt in tiers, and keeps them until they are in the store.

A search needs no lock: what it reads of the store may be out of date, and is read again when blocks are copied there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from threading import Lock, Thread
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from polarlm.engine.state.blocks import Blocks, OutOfBlocks
from polarlm.engine.state.prefix import common_prefix
from polarlm.engine.storage.copies import write_objects
from polarlm.engine.storage.objects import DamagedObject, Object
from polarlm.engine.storage.tiers.names import ObjectNames
from polarlm.engine.storage.tiers.query import TierObject, TierQuery
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess

_LOG = logging.getLogger(__name__)
_WAITING_BYTES = 1 << 30  # most bytes of blocks that have been read for all requests in the queue together
_RUN_BYTES = 8 << 20  # most bytes that are copied to the store in one unit of work, unless one block has more

T = TypeVar("T")


class Budget:
    """A limit on the bytes of blocks that have been read for requests in the queue."""

    def __init__(self, size: int = _WAITING_BYTES):
        self._size = size
        self._claims: WeakSet[Claim] = WeakSet()  # of requests that are there
        self._lock = Lock()

    def claim(self) -> Claim:
        """Return a claim to no bytes yet, which counts as long as something holds it."""
        with self._lock:
            self._claims.add(claim := Claim())
            return claim

    def take(self, claim: Claim, size: int) -> bool:
        """Let a claim have `size` more bytes; False if fewer are left."""
        with self._lock:
            if sum(one.bytes for one in self._claims) + size > self._size:
                return False
            claim.bytes += size
            return True


class Claim:
    """The bytes of a budget that one request has."""

    bytes = 0


class PromptBlock(NamedTuple):
    """A block of a prompt that was found in a tier. parent, key: the hashes before it and at its end; a block with
    fewer than N tokens has no key."""

    parent: bytes
    key: bytes | None
    ids: Sequence[int]
    block: Object


class BlockRun(NamedTuple):
    """Consecutive blocks whose objects have equal headers, or a single full-precision block. needed_groups: the groups
    of layers, as bits, in which a later token sees them."""

    blocks: Sequence[PromptBlock]
    needed_groups: int


class TierHit:
    """The blocks of a prompt's prefix that tiers hold and the store lacks."""

    def __init__(
        self,
        access: StoreAccess,
        claim: Claim,
        root: bytes,
        hashes: Sequence[bytes],
        parts: Sequence[BlockRun],
        spans: Sequence[tuple[int, int, str]],
    ):
        """claim: the bytes of `parts`. root: the hash that the prompt's chain, `hashes`, starts from. parts: in the
        order of the prompt. spans: (first position, end, label of the tier) of each block; tokens that have left all
        windows are counted with the first visible block."""
        self.spans = spans
        self._access, self._claim, self._root, self._hashes, self._parts = access, claim, root, hashes, list(parts)

    def put_back(self) -> bool:
        """Copy the next part to the store. Returns whether any are left. The caller holds the engine's lock."""
        if not self._parts:
            return False
        self._keep()
        run = self._parts.pop(0)
        try:
            if not self._adopt(run):
                self._parts.clear()
        except (MemoryError, ValueError) as error:
            _LOG.warning("blocks of a tier do not fit: %s", error)
            self._parts.clear()
        if not self._parts:
            self._claim.bytes = 0
        return bool(self._parts)

    def _keep(self) -> None:
        """Let the store reuse the prompt's blocks that it has later than all other free blocks."""
        for key in reversed(self._hashes):
            for group, block in zip(self._access.store.groups, self._access.prefixes.find_quantized(key), strict=True):
                if block is not None:
                    group.quantized.retain(block)
                    group.quantized.release(block)

    def _adopt(self, run: BlockRun) -> bool:
        """Copy to the store the blocks that it lacks: the prefix cache finds them there, and no sequence holds them.
        Returns False, and copies nothing, if there is no room. Raises ValueError for blocks of another format."""
        (store, prefixes, payloads), is_full = self._access, run.blocks[0].block.is_full
        missing = []
        for candidate in run.blocks:
            if is_full or candidate.key is None:
                store_blocks = prefixes.find_full(candidate.parent, candidate.ids)
            else:
                store_blocks = prefixes.find_complete(candidate.key)
            if any(block is None and run.needed_groups >> index & 1 for index, block in enumerate(store_blocks)):
                missing.append(candidate)
        allocators = [group.full if is_full else group.quantized for group in store.groups]
        allocated: list[Sequence[int | None]] = []
        try:
            for index, allocator in enumerate(allocators):
                is_needed = run.needed_groups >> index & 1
                allocated.append(allocator.allocate(len(missing)) if is_needed else [None] * len(missing))
            blocks: list[Blocks] = [list(ids) for ids in zip(*allocated, strict=True)]
            if missing:
                write_objects(store, payloads, blocks, [candidate.block for candidate in missing])
            for candidate, ids in zip(missing, blocks, strict=True):
                if candidate.key is None:
                    prefixes.add_full(candidate.parent, candidate.ids, ids)
                else:
                    prefixes.add(self._root, candidate.parent, candidate.ids, ids)
        except OutOfBlocks:
            return False
        finally:
            for allocator, group_blocks in zip(allocators, allocated, strict=False):
                for block in reversed(group_blocks):  # the last ones are reused first: each needs those before it
                    if block is not None:
                        allocator.release(block)
        return True

    def tokens(self, length: int) -> dict[str, int]:
        """Return how many of the first `length` tokens came from each tier, by its label."""
        counts: dict[str, int] = {}
        for start, stop, label in self.spans:
            if start < length:
                counts[label] = counts.get(label, 0) + min(stop, length) - start
        return counts


def count_sources(hit: TierHit | None, cached_tokens: int) -> dict[str, int]:
    """Return where the cached tokens of a prompt came from, see `engine.outputs.Usage`."""
    tiers = {} if hit is None else hit.tokens(cached_tokens)
    places = {"store": cached_tokens - sum(tiers.values()), **tiers}
    return {place: tokens for place, tokens in places.items() if tokens}


class Search:
    """The search for the blocks of one prompt."""

    def __init__(self, access: StoreAccess, budget: Budget, names: ObjectNames, ids: Sequence[int], salt: str):
        self._access, self._names, self._ids = access, names, ids
        self._store, self._prefixes, self._payloads = access
        self._n, self._sparse = self._store.shape.block_size, self._store.sparse_groups
        self._root, self._hashes = self._prefixes.hashes(ids, salt)
        self._budget, self._claim = budget, budget.claim()
        self._failed_states: set[int] = set()  # counts of blocks after which a snapshot could not be read

    def missing_tokens(self) -> int:
        """Return how many tokens of the prompt are in no block that the store has."""
        stored = self._n * sum(self._has_dense(self._store_blocks(number)) for number in range(len(self._hashes)))
        rest = self._ids[len(self._hashes) * self._n :]
        shared = self._prefixes.common_length(self._hashes[-1], rest) if self._hashes and rest else 0
        return len(self._ids) - stored - shared

    def run(self, query: TierQuery) -> TierHit | None:
        """Return the blocks of the longest prefix that tiers hold and the store lacks; None if none."""
        self._query = query
        while True:
            (count, tail, length), state = self._longest_prefix(), None
            if length % self._n or not count or self._stores_state(count):
                break
            state = self._state(count)
            if state is not None and self._budget.take(self._claim, len(state.block.payload)):
                break
            self._failed_states.add(count)
        blocks_read = self._read_blocks([number for number in range(count) if self._lacks(number, length)])
        blocks: list[tuple[int, TierObject]] = []
        for number in range(count):
            if not self._lacks(number, length):
                continue
            read, needed = blocks_read.get(number), self._needed_groups(number, length)
            if read is None or read.block.groups & needed != needed:
                count, tail, state, length = number, None, None, number * self._n  # later blocks are of no use
                break
            blocks.append((number, read))
        n, spans = self._n, []
        for number, (_, label) in blocks:
            spans.append((number * n if number > self._first_visible(length) else 0, (number + 1) * n, label))
        parts = self._split_runs(blocks, length)
        if state is not None:
            parts.append(BlockRun([self._prompt_block(count - 1, state.block)], state.block.groups))
        if tail is not None and self._budget.take(self._claim, len(tail.block.payload)):
            block = tail.block
            parts.append(BlockRun([PromptBlock(self._hashes[count - 1], None, block.ids, block)], block.groups))
            spans.append((count * n, count * n + len(block.ids), tail.label))
        return TierHit(self._access, self._claim, self._root, self._hashes[:count], parts, spans) if parts else None

    # -- how long it is ----------------------------------------------------------------------------------------

    def _longest_prefix(self) -> tuple[int, TierObject | None, int]:
        """Return how many complete blocks the store and tiers may hold together, the tail after them, and all tokens.
        No missing block is visible to the next token. (A longer tail may move one out of every window.)"""
        runs = self._runs()
        for follow in (self._n - 1, 0):
            count = max(
                (c for c, run in enumerate(runs) if run >= c - self._first_visible(c * self._n + follow)), default=0
            )
            tail, shared = self._tail(count)
            length = count * self._n + shared
            if runs[count] >= count - self._first_visible(length) and (shared or self._has_state(count)):
                return count, tail, length
        counts = (c for c in reversed(range(len(runs))) if runs[c] >= c - self._first_visible(c * self._n))
        count = next((c for c in counts if self._has_state(c)), 0)
        return count, None, count * self._n

    def _has_state(self, count: int) -> bool:
        """Whether the store or a tier has the snapshots at the end of the first `count` blocks, if there are such."""
        if self._stores_state(count):
            return True
        return count not in self._failed_states and self._query.has(self._names.state(self._hashes[count - 1]))

    def _stores_state(self, count: int) -> bool:
        """Whether nothing has to be read for sparse groups to continue after `count` blocks."""
        return not count or not self._sparse or not self._store_lacks(count - 1, self._sparse)

    def _runs(self) -> list[int]:
        """Return, as [i], the length of the run of blocks in the store or in tiers that ends with block i − 1.

        Tiers evict the last blocks of a conversation first, so the end of a run is found by looking up a few blocks at
        a time, each in a thread; a block that is missing after all ends it when it is read. Blocks outside all windows
        may be missing: then each is looked up.
        """
        count = len(self._hashes)
        if self._first_visible(len(self._ids)) > 0:
            runs, there = [0], self._in_threads(self._is_there, range(count))
            for number in range(count):
                runs.append(runs[-1] + 1 if there.get(number) else 0)
            return runs
        first, end = 0, count  # all blocks before the first are there, and the one at the end is not
        while first < end:
            width, parts = end - first, self._query.readers + 1
            probes = (
                [first + width * part // parts for part in range(1, parts)] if width >= parts else range(first, end)
            )
            there = self._in_threads(self._is_there, probes)
            missing = next((number for number in probes if not there.get(number)), end)
            first = max((number + 1 for number in probes if number < missing), default=first)
            end = missing
        return list(range(end + 1))

    def _is_there(self, number: int) -> bool:
        """Whether the store or a tier has complete block `number`."""
        return self._has_dense(self._store_blocks(number)) or self._query.has(self._names.block(self._hashes[number]))

    def _has_dense(self, blocks: Blocks) -> bool:
        """Whether a block is stored in all groups of layers but sparse ones."""
        groups = self._store.groups
        return all(block is not None or group.is_sparse for block, group in zip(blocks, groups, strict=True))

    def _store_blocks(self, number: int) -> Blocks:
        """Return the store's blocks of complete block `number`: for each group of layers its id, or None."""
        if number:
            return self._prefixes.find_complete(self._hashes[number])
        return self._prefixes.find_full(self._root, self._ids[: self._n])

    def _store_lacks(self, number: int, groups: int) -> bool:
        return any(block is None and groups >> index & 1 for index, block in enumerate(self._store_blocks(number)))

    def _needed_groups(self, number: int, length: int) -> int:
        """Return the groups, as bits, in which the token after `length` tokens sees block `number`, but sparse ones."""
        groups = enumerate(self._store.groups)
        return sum(1 << i for i, group in groups if number >= group.first_visible(length) and not group.is_sparse)

    def _lacks(self, number: int, length: int) -> bool:
        """Whether the token after `length` tokens sees block `number` in groups, but sparse ones, that lack it."""
        needed = self._needed_groups(number, length)
        return bool(needed) and self._store_lacks(number, needed)

    def _first_visible(self, length: int) -> int:
        """Return the number of the first block that the token after `length` tokens sees, but in sparse groups."""
        return min(group.first_visible(length) for group in self._store.groups if not group.is_sparse)

    # -- reading -----------------------------------------------------------------------------------------------

    def _in_threads(self, work: Callable[[int], T], numbers: Sequence[int]) -> dict[int, T]:
        """Return the results of `work` for these numbers. Threads take them in order, as many as tiers read in."""
        results: dict[int, T] = {}
        numbers_left, order = iter(numbers), Lock()

        def run() -> None:
            while True:
                with order:
                    number = next(numbers_left, None)
                if number is None:
                    return
                results[number] = work(number)

        threads = [Thread(target=run, name="tiers reading", daemon=True) for _ in numbers[1 : self._query.readers]]
        for thread in threads:
            thread.start()
        run()
        for thread in threads:
            thread.join()
        return results

    def _read_blocks(self, numbers: Sequence[int]) -> dict[int, TierObject | None]:
        """Read complete blocks, in order, up to one that no tier has, or that the budget has no room for."""
        end, unclaimed, order = len(self._hashes), deque(numbers), Lock()
        blocks: dict[int, TierObject | None] = {}

        def read(number: int) -> None:
            nonlocal end
            if number > end:
                return  # it is of no use
            blocks[number] = self._block(number)
            with order:  # a later block that was read sooner takes no room from it
                while unclaimed and unclaimed[0] in blocks:
                    first = unclaimed.popleft()
                    block = blocks[first]
                    if first > end or block is None or not self._budget.take(self._claim, len(block.block.payload)):
                        end, blocks[first] = min(end, first), None

        self._in_threads(read, numbers)
        return blocks

    def _block(self, number: int) -> TierObject | None:
        """Return the object of a complete block; None if no tier has it."""

        def check(block: Object) -> None:
            if number:
                self._payloads.check_block(block)
            elif self._payloads.check_full(block) != tuple(self._ids[: self._n]):
                raise DamagedObject("it has other tokens")

        return self._query.read(self._names.block(self._hashes[number]), check)

    def _state(self, count: int) -> TierObject | None:
        """Return the object of the snapshots after `count` blocks; None if no tier has it."""

        def check(block: Object) -> None:
            self._payloads.check_block(block)
            if block.groups != self._sparse:
                raise DamagedObject("it is another object")

        return self._query.read(self._names.state(self._hashes[count - 1]), check)

    def _tail(self, count: int) -> tuple[TierObject | None, int]:
        """Return the incomplete block after `count` complete ones, and how many of its first tokens are the prompt's.
        The block is None if no tier has one, or if the store has one, whose tokens are then counted."""
        rest = self._ids[count * self._n : (count + 1) * self._n]
        if not count or not rest:
            return None, 0
        parent = self._hashes[count - 1]
        if shared := self._prefixes.common_length(parent, rest):
            return None, shared
        read = self._query.read(self._names.tail(parent), self._payloads.check_full)
        if read is None or read.block.groups != self._payloads.every_group:
            return None, 0
        shared = common_prefix(read.block.ids, rest)
        return (read, shared) if shared else (None, 0)

    # -- parts -------------------------------------------------------------------------------------------------

    def _split_runs(self, blocks: Sequence[tuple[int, TierObject]], length: int) -> list[BlockRun]:
        """Return the complete blocks that were read. Consecutive blocks of one format are one run."""

        def kind(member: tuple[int, tuple[int, TierObject]]) -> tuple[Any, ...]:
            index, (number, (block, _)) = member
            run_blocks = max(1, _RUN_BYTES // len(block.payload))
            return self._needed_groups(number, length) & block.groups, number - index, block.header, index // run_blocks

        return [
            BlockRun([self._prompt_block(number, read.block) for _, (number, read) in members], needed)
            for (needed, *_), members in groupby(enumerate(blocks), kind)
            if needed
        ]

    def _prompt_block(self, number: int, block: Object) -> PromptBlock:
        parent = self._hashes[number - 1] if number else self._root
        return PromptBlock(parent, self._hashes[number], self._ids[number * self._n : (number + 1) * self._n], block)
