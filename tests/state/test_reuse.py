"""Which blocks are reused first: conversations that take turns find as much as fits, in whatever order they come."""

from __future__ import annotations

import numpy as np
import pytest

from polarlm.engine.state.blocks import BlockAllocator
from polarlm.engine.state.reuse import Returns
from tests.state.fed import N
from tests.state.test_prefix import CachedStore, words

ROOM = 24  # blocks of the store
LENGTH = 4  # blocks of a conversation


class Conversations:
    """Conversations in a store; each turn adds a few tokens."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), system: int = 0):
        """system: tokens that all of them begin with."""
        self.cached = CachedStore(windows=windows, tokens=ROOM * N, sequences=32)
        self._texts: dict[int, list[int]] = {}
        self._system = words(99, system)

    def turn(self, number: int) -> float:
        """Compute a turn of a conversation, and return which part of its earlier tokens was found."""
        before = self._texts.get(number, [])
        start = [*self._system, *words(number, LENGTH * N - len(self._system))]
        ids = [*(before or start), *words(1000 + len(before), 3)]
        sequence = self.cached.prefill(ids)
        sequence.end()
        self._texts[number] = ids
        return sequence.found / max(1, len(before))

    @property
    def allocator(self) -> BlockAllocator:
        return self.cached.store.groups[0].quantized


@pytest.mark.parametrize(
    ("windows", "share", "count"), [((None,), 0.75, 10), ((None,), 0.75, 18), ((None, 12), 0.5, 10)]
)
def test_turns_in_a_circle_find_as_much_as_fits(windows: tuple[int | None, ...], share: float, count: int) -> None:
    """With a window, a conversation whose end has been overwritten is not found at all."""
    some = Conversations(windows)
    found = [np.mean([some.turn(number) for number in range(count)]) for _ in range(3)]
    fits = ROOM / (LENGTH * count)
    assert found[0] == 0
    assert found[1] > 0.5 * share * fits  # the first ones of this round come while the oldest blocks are reused first
    assert found[2] > share * fits


def test_conversations_that_come_back_soon_find_everything_again() -> None:
    """After turns in a circle, the order changes back."""
    some = Conversations()
    for _ in range(2):
        for number in range(12):
            some.turn(number)
    assert some.allocator.newest_first
    found = [some.turn(number) for start in range(30, 42, 3) for _ in range(6) for number in range(start, start + 3)]
    assert not some.allocator.newest_first
    assert np.mean(found[-15:]) > 0.95  # all but the three that are new


def test_tokens_that_all_conversations_begin_with_count_once() -> None:
    """Seven conversations of four to five blocks fit into 24 if two of these are the same in all of them."""
    some = Conversations(system=2 * N)
    for _ in range(3):
        found = [some.turn(number) for number in range(7)]
        assert not some.allocator.newest_first
    assert min(found) > 0.95


def test_a_preempted_sequence_is_not_the_next_to_be_overwritten() -> None:
    some = Conversations()
    for _ in range(2):
        for number in range(12):
            some.turn(number)
    preempted = some.cached.prefill(words(50, LENGTH * N + 1))
    some.cached.prefixes.release(preempted.kv, preempted.ids, continues=True)
    some.turn(60)
    assert some.cached.found(preempted.ids) >= LENGTH * N


def test_the_same_prompt_comes_once() -> None:
    """A request that waits for room looks for its prefix again and again."""
    returns = Returns(4)
    chain = [bytes([number]) for number in range(6)]
    returns.released(chain[:2])
    returns.released([b"another", b"which", b"is", b"long"])
    for _ in range(8):
        returns.came(chain[:3])
    assert not returns.are_late
    for number in range(3, 6):
        returns.released(chain[:number])
        returns.released([bytes([number, at]) for at in range(4)])
        returns.came(chain[: number + 1])
    assert returns.are_late
