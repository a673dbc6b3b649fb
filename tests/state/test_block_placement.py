"""Two kinds of blocks in one memory: none loses its contents, whatever is placed, requantized and released."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polarlm.engine.state.blocks import NeedsRequantize, OutOfBlocks
from polarlm.engine.state.requantize.blocks import MixedPrecisionAllocator
from polarlm.engine.state.requantize.placement import BlockPlace, BlockPlacement


class Memory(RuleBasedStateMachine):
    """An allocator over real bytes: each block is filled with its own number when it is allocated."""

    @initialize(
        size=st.integers(1, 24),
        bytes_each=st.tuples(st.integers(2, 9), st.integers(2, 9)),
        newest=st.integers(1, 4),
    )
    def make(self, size: int, bytes_each: tuple[int, int], newest: int) -> None:
        self.each = {True: max(bytes_each), False: min(bytes_each)}
        self.memory = bytearray((size + 1) * self.each[False])
        placement = BlockPlacement(size + 1, (self.each[True], self.each[False]), self.move)
        each = self.each[True], self.each[False]
        self.blocks = MixedPrecisionAllocator(placement, size, each, newest)
        self.held: dict[int, bytes] = {}  # block → its contents
        self.kept: dict[int, bytes] = {}  # released blocks that can be found
        self.coded: set[int] = set()  # the blocks whose place of the other kind has contents
        self.count = 0

    def bytes_of(self, place: BlockPlace) -> slice:
        each = self.each[place.is_high_precision]
        assert 0 <= place.number * each <= len(self.memory) - each
        return slice(place.number * each, (place.number + 1) * each)

    def move(self, target: BlockPlace, source: BlockPlace) -> None:
        self.memory[self.bytes_of(target)] = self.memory[self.bytes_of(source)]

    def fill(self, block: int, place: BlockPlace, content: int) -> bytes:
        own = self.bytes_of(place)
        self.memory[own] = bytes([content]) * (own.stop - own.start)
        return bytes([content])

    def forget(self, block: int) -> None:
        del self.kept[block]

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free, high_precision = self.blocks.free, {*self.blocks._aged, *self.blocks._newest}
        try:
            taken = self.blocks.allocate(count)
        except NeedsRequantize:
            assert high_precision
            return
        except OutOfBlocks:
            assert count > free
            return
        kinds = [self.blocks.placement[block].is_high_precision for block in taken]
        assert kinds == sorted(kinds)  # the last ones are high-precision
        assert sum(kinds) <= self.blocks.newest
        for block in taken:
            self.count = (self.count + 1) % 256
            self.held[block] = self.fill(block, self.blocks.placement[block], self.count)
            self.blocks.add_newest(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_due=st.booleans())
    def age(self, data: st.DataObject, is_due: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.blocks.add_aged(block, is_due=is_due)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_kept=st.booleans())
    def release(self, data: st.DataObject, is_kept: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        content = self.held.pop(block)
        if is_kept:
            self.blocks.keep(block, lambda: self.forget(block))
            self.kept[block] = content
        self.blocks.release(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), is_dropped=st.booleans())
    def find(self, data: st.DataObject, is_dropped: bool) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        content = self.kept.pop(block)
        if not is_dropped:
            self.blocks.retain(block)
            self.held[block] = content
        self.blocks.drop(block)

    @rule()
    def requantize(self) -> None:
        begun, could_be = next(iter(self.blocks.placement.targets), None), set(self.kept) & set(self.blocks._aged)
        block = self.blocks.begin_next()
        if block is None:
            return
        assert block == begun or block in self.kept or not could_be  # blocks of the prefix cache come first
        if block not in self.coded:  # it may be moved until it is finished
            self.fill(block, self.blocks.placement.targets[block], {**self.held, **self.kept}[block][0])
            self.coded.add(block)
            return
        self.blocks.finish(block)

    @rule()
    def requantize_aged(self) -> None:
        """What is due, one round after the other as there is room, and a part of others."""
        while self.blocks.has_due:
            due, others = self.blocks.begin_aged()
            assert due or others
            self.fill_targets([*due, *others])
            for block in due or others:
                self.blocks.finish(block)
        _, others = self.blocks.begin_aged()
        assert others or not self.blocks._aged
        self.fill_targets(others)

    def fill_targets(self, blocks: list[int]) -> None:
        for block in blocks:
            self.fill(block, self.blocks.placement.targets[block], {**self.held, **self.kept}[block][0])
        self.coded |= {*blocks}

    @invariant()
    def every_block_has_its_own_contents(self) -> None:
        known = {**self.held, **self.kept}
        used = bytearray(len(self.memory))
        for block, content in known.items():
            own = self.bytes_of(self.blocks.placement[block])
            assert self.memory[own] == content * (own.stop - own.start)
            used[own] = b"\1" * (own.stop - own.start)
        each = [self.each[self.blocks.placement[block].is_high_precision] for block in known]
        coding = self.blocks.placement.targets
        self.coded &= coding.keys()
        for block in self.coded:
            assert self.memory[self.bytes_of(coding[block])] == known[block] * self.each[False]
        for place in coding.values():
            used[self.bytes_of(place)] = b"\1" * self.each[False]
        each_coded = len(coding) * self.each[False]
        assert sum(used) == sum(each) + each_coded == len(self.memory) - self.blocks.placement.free  # none overlap
        assert sum(each) <= self.blocks.size * self.each[False]
        kinds = [self.blocks.placement[block].is_high_precision for block in known]
        high_precision, others = self.blocks.placement.counts()
        assert (high_precision, others) == (sum(kinds), len(kinds) - sum(kinds))


Memory.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestMemory = Memory.TestCase


@given(st.integers(1, 40))
@settings(max_examples=40)
def test_as_many_blocks_fit_as_if_none_were_in_high_precision(size: int) -> None:
    placement = BlockPlacement(size + 1, (7, 5), lambda target, source: None)
    blocks = MixedPrecisionAllocator(placement, size, (7, 5), 3)
    for count in range(size):
        while True:
            try:
                (block,) = blocks.allocate()
            except NeedsRequantize:
                blocks.finish(blocks.begin_next())
            else:
                blocks.add_newest(block)
                break
        assert blocks.size - blocks.free == count + 1
    with pytest.raises(OutOfBlocks):
        blocks.allocate()
