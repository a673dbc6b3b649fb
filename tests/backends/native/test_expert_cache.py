"""The least recently used experts are evicted, and a batch never evicts an expert of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine.backends.native import tiles
from polarlm.engine.backends.native.product_ops.loading import CachedTiles, ExpertMatrices
from polarlm.engine.backends.ops import ExpertCache
from polarlm.engine.errors import EngineError
from polarlm.model_loaders.errors import LoadError
from tests import weights

COUNT = 7


class Read:
    """Packs an expert as tiles that hold its number."""

    def __init__(self) -> None:
        self.experts: list[int] = []
        self.fails = False

    def __call__(self, stored: ExpertMatrices, target: np.ndarray) -> None:
        if self.fails:
            raise LoadError("a file has changed")
        expert = int(stored[0].values[0, 0])  # type: ignore[attr-defined]
        self.experts.append(expert)
        target[...] = expert


class Matrix(weights.StoredArray):
    def expect(self) -> None:
        pass


def cached(slots: int) -> tuple[CachedTiles, Read, ExpertCache]:
    stored = [[Matrix(np.full((tiles.ROWS, 4), expert, np.float32), "f32")] for expert in range(COUNT)]
    read, cache = Read(), ExpertCache(slots)
    return CachedTiles(np.zeros((slots, 8), np.uint8), slots, stored, read, cache), read, cache


@given(st.integers(1, COUNT), st.lists(st.sets(st.integers(0, COUNT - 1), min_size=1), min_size=1, max_size=12))
def test_every_batch_finds_its_experts(slots: int, requests: Sequence[set[int]]) -> None:
    data, read, cache = cached(slots)
    recent: list[int] = []  # the least recently used first
    for experts in map(sorted, requests):
        actual, held = [], set(recent[-slots:]) & set(experts)
        for batch in data.batches(experts):
            wanted = [experts[index] for index in batch]
            missing, before = [expert for expert in wanted if expert not in recent[-slots:]], len(read.experts)
            places = data.take(wanted)
            assert [int(data.memory[place, 0]) for place in places] == wanted
            assert read.experts[before:] == missing
            recent = [expert for expert in recent[-slots:] if expert not in wanted]
            recent += [expert for expert in wanted if expert not in missing] + missing
            actual += wanted
        assert sorted(actual) == experts
        assert set(actual[: len(held)]) == held  # used before they are evicted
    assert cache.misses == len(read.experts)
    assert cache.hits + cache.misses == sum(map(len, requests))


def test_a_failed_read_loses_no_slot() -> None:
    data, read, _ = cached(2)
    data.take([0, 1])
    read.fails = True
    for _ in range(3):
        with pytest.raises(EngineError, match="a file has changed"):
            data.take([1, 2])
    read.fails = False
    for experts in ([1, 2], [3, 4], [0, 1]):
        assert [int(data.memory[place, 0]) for place in data.take(experts)] == experts


def test_rows_are_found_wherever_their_expert_is() -> None:
    data, _, cache = cached(3)
    slots = data.take([4, 2])
    rows = data.rows(np.array([4 * tiles.ROWS + 3, 2 * tiles.ROWS, 6 * tiles.ROWS + 1]))
    assert cache.misses == 2  # only chosen experts count
    np.testing.assert_array_equal(rows, np.array([*slots, *data.take([6])]) * tiles.ROWS + [3, 0, 1])
