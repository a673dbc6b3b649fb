"""The store: whatever the spans, attention reads what it must, and no block leaks."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.errors import EngineError
from polarlm.engine.state.store import Span
from tests.state.fed import Fed, N, assert_held_by, held, make_store


@pytest.mark.parametrize("recent", [0, 1, 4])
@pytest.mark.parametrize(
    ("codec", "mean_bits", "window"),
    [("f16", 0, None), ("polarquant", 8, None), ("polarquant", 16, 5), ("polarquant", 8, 1), ("polarquant", 0, 20)],
)
def test_attention_reads_sink_codes_recent_and_current_blocks(
    codec: str, mean_bits: int, window: int | None, recent: int
) -> None:
    sequence = Fed(make_store(codec, codec, mean_bits, (window,), recent=recent))
    for count, chunk in [(3, None), (1, None), (40, 7), (1, None), (1, None), (1, None), (6, 1), (30, None), (1, None)]:
        sequence.feed(count, chunk)
    for _ in range(2 * N + 1):
        sequence.feed(1, step=True)
        sequence.store.encode_ahead()
        if window is None:
            assert len(sequence.kv.tables[0].recent) == recent
        assert sequence.store.bytes_held(sequence.kv) == sequence.store.shape.sequence_bytes(sequence.kv.length)
        assert_held_by(sequence.store, [sequence.kv])


@pytest.mark.parametrize("recent", [0, 2])
@pytest.mark.parametrize(("first", "window"), [(0, None), (3, 5), (N - 1, 20), (N, 1), (3 * N + 5, 20)])
def test_rows_of_a_step_attend_to_each_other_and_are_forgotten_unless_kept(
    first: int, window: int | None, recent: int
) -> None:
    """Across ends of blocks, the first one too, however many rows are kept."""
    sequence = Fed(make_store("ring4", "ring3.5", 8, (window, None), sequences=8, recent=recent))
    if first:
        sequence.feed(first)
    for count, kept in [(5, 2), (N, 0), (2, 2), (STEP_ROWS, 5), (3, 3), (STEP_ROWS, STEP_ROWS), (7, 1), (N + 1, N)]:
        sequence.feed(count, step=True, kept=kept)
        assert sequence.store.bytes_held(sequence.kv) == sequence.store.shape.sequence_bytes(sequence.kv.length)
        assert_held_by(sequence.store, [sequence.kv])
    sequence.feed(N)


@pytest.mark.parametrize(
    ("first", "count", "step"), [(0, 3 * N + 1, False), (3, 2, False), (N, N, False), (20, 1, True), (3, N, True)]
)
def test_an_aborted_span_changes_nothing(first: int, count: int, step: bool) -> None:
    sequence = Fed(make_store("polarquant", "polarquant", windows=(None, 12), recent=1))
    if first:
        sequence.feed(first)
    before = held(sequence.store)
    sequence.feed(count, step=step, commit=False)
    assert held(sequence.store) == before
    sequence.feed(5)
    sequence.feed(1, step=True)


def test_a_prompt_without_memory_for_its_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = Fed(make_store(windows=(None, 30), recent=1))
    sequence.feed(2 * N + 3)
    before = held(sequence.store)
    with monkeypatch.context() as patch:
        patch.setattr(sequence.store.ops, "buffer", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            sequence.store.open(sequence.kv, 3 * N)
    assert held(sequence.store) == before
    sequence.feed(3 * N)


def test_a_damaged_row_is_an_error_of_its_own_sequence_if_it_is_kept() -> None:
    """In a block that is encoded; a row that is not kept is no error."""
    store = make_store("ring4", "ring3.5", sequences=8)
    sequences = [Fed(store, seed) for seed in range(3)]
    for sequence in sequences:
        sequence.feed(2 * N - 2)

    def opened(damaged: int, row: int) -> list[Span]:
        spans = [store.open_step(sequence.kv, 4) for sequence in sequences]
        for i, span in enumerate(spans):
            k, v = sequences[i].new(4)
            if i == damaged:
                k[row] = np.nan
            store.ops.append_kv(store.cache(0), [store.view(0, span, slice(0, 4), span.start)], k, v)
        return spans

    # Lengths are 2N − 2 → 2N − 1: the damaged row is rejected, and the block is not full.
    assert store.commit_steps(opened(1, 1), [1, 1, 1]) == {}
    # 2N − 1 → 2N + 1: the damaged row is kept, but in the block after the full one.
    assert store.commit_steps(opened(1, 1), [2, 2, 2]) == {}
    for sequence in sequences:
        span = store.open_step(sequence.kv, N - 3)
        store.commit(span)
    # 3N − 2 → 3N, 3N, 3N − 1: of the three, the second has a full block with a damaged row.
    damaged = store.commit_steps(opened(1, 1), [2, 2, 1])
    assert list(damaged) == [1]
    assert (damaged[1].code, isinstance(damaged[1], EngineError)) == ("model_damaged", True)
    assert [sequence.kv.length for sequence in sequences] == [3 * N, 3 * N, 3 * N - 1]


def test_steps_can_be_aborted_after_an_interrupted_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two is committed when the second is interrupted, and stays committed."""
    store = make_store("ring4", "ring3.5")
    done, sequence = Fed(store, 1), Fed(store, 2)
    for fed in (done, sequence):
        fed.feed(2 * N - 1)
    before = store.open_step(done.kv)
    store.ops.append_kv(store.cache(0), [store.view(0, before, slice(0, 1), before.start)], *done.new(1))
    store.commit(before)
    taken, span = held(store), store.open_step(sequence.kv)
    with monkeypatch.context() as patched:
        patched.setattr(store.ops, "encode_blocks", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.commit(span)
    for either in (before, span):
        store.abort(either)
    assert (held(store), done.kv.length, sequence.kv.length) == (taken, 2 * N, 2 * N - 1)
    assert_held_by(store, [done.kv, sequence.kv])
    sequence.feed(2, step=True)
