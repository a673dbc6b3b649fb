"""Lists of cases have what they promise, and little more."""

from __future__ import annotations

from itertools import combinations, product

from tests.pairs import each, pairs


def test_every_value_occurs() -> None:
    assert each("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]
    assert each([[]], "ab", [1]) == [([], "a", 1), ([], "b", 1)]


def test_any_two_values_occur_together() -> None:
    for axes in ("ab", "cd", "efgh"), ("abc", "def", "ghi"), ("ab", "cde", "fgh", "ij"), (range(16), "ab", "cde"):
        found = pairs(*axes)
        for (i, one), (j, other) in combinations(enumerate(axes), 2):
            assert {(row[i], row[j]) for row in found} == set(product(one, other)), axes
        *_, second, most = sorted(map(len, axes))
        assert len(found) <= second * most + 1, axes
        assert len(found) == len(set(found)), axes
