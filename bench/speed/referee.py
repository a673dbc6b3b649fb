"""Alternates the runs of contestants, so that a machine that slows down slows all of them, and shows progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polarlm.bench.speed.child import Failed
from polarlm.bench.speed.contestants import Children
from polarlm.bench.speed.figures import Cell, is_far_behind
from polarlm.engine.cli.progress import progress_bar

if TYPE_CHECKING:
    from tqdm import tqdm

# A library's idle threads may spin for a moment, which would slow down the next run.
_REST_SECONDS = 0.1


@dataclass
class Runs:
    """The runs of a cell: run(number) measures a rate; number −1 is a warm-up, which does not count."""

    cell: Cell
    run: Callable[[int], float]


class Referee:
    """Runs contestants in turn. The progress bar counts expected seconds, since some runs are much longer; it moves in
    long runs, too."""

    def __init__(self, children: Children, repeat: int) -> None:
        self.repeat = repeat
        self._children = children
        self._bars = ExitStack()
        self._bar: tqdm[Any] | None = None

    def show(self, expected: float) -> None:
        """Show a progress bar for runs of which `expected` is the sum of what `advance` will be called with."""
        layout = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left{postfix}"
        bar = progress_bar(True, total=round(expected, 1), desc="Measuring", bar_format=layout)
        self._bar = self._bars.enter_context(bar)

    def close(self) -> None:
        self._bars.close()

    def announce(self, name: str) -> None:
        """Show the name of what is measured next."""
        if self._bar is not None:
            self._bar.set_postfix_str(name)

    def measure(self, name: str, runs: Sequence[Runs], warm_up: bool = True, expected: float = 0) -> None:
        """Measure each `repeat` times, in turn, with `warm_up` after a run that does not count; fewer times where more
        threads leave a contestant's fewer ones far behind.

        expected: the seconds that all runs should take.
        """
        self.announce(name)
        numbers = range(-1 if warm_up else 0, self.repeat)
        for number in numbers:
            for one in runs:
                if not is_far_behind(one.cell, [other.cell for other in runs]):
                    rate = self._run(one, number)
                    if rate is not None and number >= 0:
                        one.cell.runs.append(rate)
                self.advance(expected / (len(numbers) * len(runs)))

    def advance(self, seconds: float) -> None:
        """Advance the progress bar by work that was expected to take `seconds`."""
        if self._bar is not None:
            self._bar.update(min(seconds, self._bar.total - self._bar.n))  # sums of parts are rounded

    def _run(self, one: Runs, number: int) -> float | None:
        contestant = one.cell.contestant
        if contestant not in self._children.failures:
            time.sleep(_REST_SECONDS)
            try:
                return one.run(number)
            except Failed as error:
                self._children.fail(contestant, str(error))
        one.cell.failure = self._children.failures[contestant]
        return None
