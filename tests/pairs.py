"""Short lists of cases instead of the product of all values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from itertools import combinations, cycle, islice, product
from typing import Any

import pytest

Test = Callable[..., None]


def in_turn(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but one test, which runs with all cases in turn: for many cases that are fast.

    A failure prints the values of its case. A case that the test skips is left out; a test that skips every case fails,
    since it would say nothing. Without cases (a list of levels that this machine lacks) the test is skipped.
    """
    keys, values = names.split(), list(cases)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]

        @functools.wraps(test)
        def run_all(*args: Any, **kwargs: Any) -> None:
            if not values:
                pytest.skip(f"there is no case of {names} here")
            kwargs |= zip((parameter.name for parameter in others), args, strict=False)  # Hypothesis gives positions
            skipped = []
            for case in values:
                chosen = dict(zip(keys, case if len(keys) > 1 else (case,), strict=True))
                print(*(getattr(value, "name", value) for value in chosen.values()))
                try:
                    test(**kwargs, **chosen)
                except pytest.skip.Exception as reason:
                    skipped.append(str(reason))
            if len(skipped) == len(values):
                pytest.fail(f"every case is skipped: {skipped[0]}")

        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_all

    return decorate


def mostly_slow(names: str, cases: Iterable[Any], often: Collection[Any], **more: Any) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`, but cases that are not among `often` are slow."""
    several = "," in names
    marks = {True: (), False: pytest.mark.slow}
    given = [pytest.param(*(case if several else (case,)), marks=marks[case in often]) for case in cases]
    return pytest.mark.parametrize(names, given, **more)


def each(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples with a value of each axis, in which every value occurs: as many as the longest axis has values. Shorter
    axes repeat theirs in turn. None if an axis has none."""
    values = [list(axis) for axis in axes]
    most = max(map(len, values)) if all(values) else 0
    return list(zip(*(islice(cycle(axis), most) for axis in values), strict=True))


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples with a value of each axis, in which any two values of different axes occur together. Each tuple is the
    first of those in the product that have the most pairs that no earlier one has."""
    values = [list(axis) for axis in axes]
    rows = [tuple(enumerate(row)) for row in product(*(range(len(axis)) for axis in values))]
    bits: dict[Any, int] = {}  # pair → its bit: counting the bits of a number is ten times as fast as a set
    of_rows = [sum(bits.setdefault(pair, 1 << len(bits)) for pair in combinations(row, 2)) for row in rows]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        row = max(range(len(rows)), key=lambda row: (of_rows[row] & missing).bit_count())
        missing &= ~of_rows[row]
        chosen.append(tuple(values[axis][place] for axis, place in rows[row]))
    return chosen
