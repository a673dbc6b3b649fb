"""Alternates the runs of contestants, so that a machine that slows down slows all of them, and shows progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

from polarlm.bench.speed.child import Failed
from polarlm.bench.speed.contestants import Children
from polarlm.bench.speed.figures import Cell, is_far_behind
from polarlm.engine.cli.progress import counting

T = TypeVar("T")
Run = Callable[[Cell, int], float]  # run(cell, number) measures a rate

# A library's idle threads may spin for a moment, which would slow down the next run.
_REST_SECONDS = 0.1


class Referee:
    """Runs contestants in turn, and shows how much of the work is done, whose parts `begin` names in order."""

    def __init__(self, children: Children, repeat: int) -> None:
        self.repeat = repeat
        self._children = children
        self._shown = ExitStack()
        self._count: Callable[[str, float], None] = lambda beside, amount: None
        self._name = ""
        self._work = self._begun = self._done = 0.0  # work of the current part, of all parts before it, and done

    def show(self, work: float) -> None:
        """Show the progress of the work of all parts."""
        self._count = self._shown.enter_context(counting("Measuring", total=work))

    def begin(self, work: float) -> None:
        """Begin the next part. All work of the parts before it counts as done."""
        self._begun += self._work
        self._work = work
        self._advance(self._begun - self._done)

    def advance(self, share: float) -> None:
        """Advance by a share of the current part."""
        self._advance(min(share * self._work, self._begun + self._work - self._done))

    def _advance(self, amount: float) -> None:
        self._done += amount
        self._count(self._name, amount)

    def close(self) -> None:
        self._shown.close()

    def announce(self, name: str) -> None:
        """Show the name of what is measured next."""
        self._name = name
        self._advance(0)

    def measure(self, name: str, cells: Sequence[Cell], run: Run, *, warm_up: bool = True, share: float = 1) -> None:
        """Run each cell `repeat` times, in turn; fewer times where the same contestant with more threads is far faster.

        warm_up: whether a run −1 comes first, which does not count. share: which share of the current part this is.
        """
        self.announce(name)
        rounds = range(-1 if warm_up else 0, self.repeat)
        for number in rounds:
            for cell in cells:
                if not is_far_behind(cell, cells):
                    rate = self._rate(cell, run, number)
                    if rate is not None and number >= 0:
                        cell.runs.append(rate)
                self.advance(share / (len(rounds) * len(cells)))

    def _rate(self, cell: Cell, run: Run, number: int) -> float | None:
        if cell.contestant not in self._children.failures:
            time.sleep(_REST_SECONDS)
            try:
                return run(cell, number)
            except Failed as error:
                self._children.fail(cell.contestant, str(error))
        cell.failure = self._children.failures[cell.contestant]
        return None


def in_turn(runs: Mapping[str, Callable[[], T]], repeat: int) -> dict[str, list[T]]:
    """Call all of `runs` in turn, `repeat` times after a round that does not count; returns what each has returned."""
    results: dict[str, list[T]] = {name: [] for name in runs}
    with counting("Measuring", "run", (1 + repeat) * len(runs)) as count:
        for _ in range(1 + repeat):
            for name, run in runs.items():
                results[name].append(run())
                count(name)
    return {name: of_name[1:] for name, of_name in results.items()}
