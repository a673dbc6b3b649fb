"""Short lists of cases instead of the product of all values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, cycle, islice, product
from typing import Any


def each(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples with a value of each axis, in which every value occurs: as many as the longest axis has values. Shorter
    axes repeat theirs in turn."""
    values = [list(axis) for axis in axes]
    most = max(map(len, values))
    return list(zip(*(islice(cycle(axis), most) for axis in values), strict=True))


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples with a value of each axis, in which any two values of different axes occur together. Each tuple is the
    first of those in the product that have the most pairs that no earlier one has."""
    values = [list(axis) for axis in axes]
    rows = [tuple(enumerate(row)) for row in product(*(range(len(axis)) for axis in values))]
    missing = {pair for row in rows for pair in combinations(row, 2)}
    chosen = []
    while missing:
        row = max(rows, key=lambda row: sum(pair in missing for pair in combinations(row, 2)))
        missing.difference_update(combinations(row, 2))
        chosen.append(tuple(values[axis][place] for axis, place in row))
    return chosen
