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
    bits: dict[Any, int] = {}  # of each pair: counting those of a number takes a tenth of the time of a set's
    of_rows = [sum(bits.setdefault(pair, 1 << len(bits)) for pair in combinations(row, 2)) for row in rows]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        row = max(range(len(rows)), key=lambda row: (of_rows[row] & missing).bit_count())
        missing &= ~of_rows[row]
        chosen.append(tuple(values[axis][place] for axis, place in rows[row]))
    return chosen
