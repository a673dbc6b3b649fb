"""Repetitions at the end of a sequence, and sequences that repeat one piece endlessly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.sampling.repeats import Repeats

SEEDS = st.integers(0, 2**32 - 1)


def repetitive(seed: int, length: int) -> list[int]:
    """Ids that repeatedly copy an earlier piece."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(1, 9)
    ids = rng.integers(0, kinds, rng.integers(1, 5)).tolist()
    while len(ids) < length:
        begin = rng.integers(0, len(ids))
        times = rng.integers(1, 5)
        ids += ids[begin : begin + rng.integers(1, 12)] * times if rng.random() < 0.6 else [int(rng.integers(kinds))]
    return ids[:length]


@given(st.builds(repetitive, SEEDS, st.integers(1, 90)), st.integers(1, 90), st.one_of(st.none(), st.integers(1, 20)))
def test_runs_match_a_comparison_of_each_place(ids: list[int], first: int, furthest: int | None) -> None:
    repeats = Repeats(furthest)
    repeats.extend(ids[:first])
    for token in ids[first:]:
        repeats.extend([token])
    assert repeats.ids.tolist() == ids
    start = max(min(first, len(ids)) - (furthest or len(ids)) - 1, 0)  # what came before is not looked at
    for distance, run in enumerate(repeats.runs.tolist(), 1):
        expected = 0
        while expected + distance < len(ids) - start and ids[-1 - expected] == ids[-1 - expected - distance]:
            expected += 1
        assert run == expected


@pytest.mark.parametrize("period", [3, 4])  # the first room has so many of one that they fit in whole, and of one not
def test_arrays_grow_with_the_sequence(period: int) -> None:
    ids = [i % period for i in range(1000)]
    repeats = Repeats()
    repeats.extend(ids[:period])
    for token in ids[period:]:
        repeats.extend([token])
    assert repeats.runs[period - 1 :: period].tolist() == list(range(1000 - period, 0, -period))
    others = np.arange(1, len(repeats.runs) + 1) % period > 0
    assert not repeats.runs[others].any()


@given(st.builds(repetitive, SEEDS, st.integers(1, 90)), st.integers(1, 20), st.integers(2, 4))
def test_a_circle_repeats_one_piece(ids: list[int], tokens: int, rounds: int) -> None:
    repeats = Repeats()
    repeats.extend(ids[:1])
    for count, token in enumerate(ids[1:], 2):
        repeats.extend([token])
        expected = any(
            ids[count - length : count] == (ids[count - length : count - length + piece] * count)[:length]
            for length in range(tokens, count + 1)
            for piece in range(1, length // rounds + 1)
        )
        assert repeats.circle(tokens, rounds) == expected
