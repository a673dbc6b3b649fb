"""The allocator: whatever the order of calls, no block leaks, and none is allocated twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks

SIZE = 7


class Schedules(RuleBasedStateMachine):
    """Random allocate, keep, drop, retain and release against a plain dictionary of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(SIZE)
        self.held: dict[int, int] = {}
        self.kept: set[int] = set()  # whose contents can be found

    @rule(count=st.integers(0, SIZE + 2), are_guesses=st.booleans())
    def allocate(self, count: int, are_guesses: bool) -> None:
        free = SIZE - len(self.held)
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.blocks.allocate(count)
            return
        taken = self.blocks.allocate(count, are_guesses=are_guesses)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held)
        assert not set(taken) & self.kept  # `forget` was called for them
        self.held.update(dict.fromkeys(taken, 1))

    @rule(block=st.integers(0, SIZE - 1), is_first=st.booleans())
    def keep(self, block: int, is_first: bool) -> None:
        if block in self.held:
            self.blocks.keep(block, lambda: self.kept.remove(block), is_first=is_first)
            self.kept.add(block)
        else:
            with pytest.raises(ValueError, match="free"):
                self.blocks.keep(block, lambda: None)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.blocks.drop(block)
        self.kept.remove(block)

    @rule(block=st.integers(0, SIZE - 1))
    def retain(self, block: int) -> None:
        if block in self.held or block in self.kept:
            self.blocks.retain(block)
            self.held[block] = self.held.get(block, 0) + 1
        else:
            with pytest.raises(ValueError, match="free"):
                self.blocks.retain(block)

    @rule(block=st.integers(0, SIZE - 1))
    def release(self, block: int) -> None:
        if block not in self.held:
            with pytest.raises(ValueError, match="free already"):
                self.blocks.release(block)
            return
        self.blocks.release(block)
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]

    @invariant()
    def counts_agree(self) -> None:
        assert self.blocks.free == SIZE - len(self.held)
        assert self.blocks.kept == len(self.kept - self.held.keys())
        assert self.blocks.free - self.blocks.kept <= self.blocks.idle <= self.blocks.free
        assert all(self.blocks.references(block) == self.held.get(block, 0) for block in range(SIZE))


Schedules.TestCase.settings = settings(max_examples=20)
TestSchedules = Schedules.TestCase


def test_kept_blocks_are_allocated_last() -> None:
    blocks, forgotten = BlockAllocator(4), []
    first, second, third = blocks.allocate(3)
    for block in (first, second):
        blocks.keep(block, lambda block=block: forgotten.append(block))
    for block in (second, third, first):
        blocks.release(block)
    assert blocks.allocate(2) == [third, 3]
    assert forgotten == []
    blocks.retain(second)
    blocks.release(second)  # used again: it is the newest now
    assert blocks.allocate(2) == [first, second]
    assert forgotten == [first, second]


def test_guesses_are_allocated_before_other_kept_blocks_until_one_is_found() -> None:
    blocks, forgotten = BlockAllocator(5), []
    taken = [*blocks.allocate(2), *blocks.allocate(2, are_guesses=True)]
    for block in taken:
        blocks.keep(block, lambda block=block: forgotten.append(block), is_first=block == taken[2])
        blocks.release(block)
    assert blocks.idle == 3
    blocks.retain(taken[2])  # found
    blocks.release(taken[2])
    assert blocks.idle == 2
    assert blocks.allocate(3) == [4, taken[3], taken[0]]
    assert forgotten == [taken[3], taken[0]]


def test_first_blocks_are_allocated_after_other_kept_ones_up_to_three_quarters_of_all() -> None:
    blocks = BlockAllocator(8)
    taken = blocks.allocate(8)
    for block in taken:
        blocks.keep(block, lambda: None, is_first=block < 7)
        blocks.release(block)
    assert blocks.allocate(2) == [0, 7]  # seven first blocks are too many, six are not
    assert blocks.allocate(6) == [1, 2, 3, 4, 5, 6]
