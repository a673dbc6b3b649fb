"""Alternates the runs of contestants, so that a machine that slows down slows all of them, and shows progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from polarlm.bench.speed.child import Failed
from polarlm.bench.speed.contestants import Children
from polarlm.bench.speed.figures import Cell

# A library's idle threads may spin for a moment, which would slow down the next run.
_REST_SECONDS = 0.1


@dataclass
class Runs:
    """The runs of a cell: run(number) measures a rate; number −1 is a warm-up, which does not count."""

    cell: Cell
    run: Callable[[int], float]


class Referee:
    """Runs contestants in turn. The progress bar counts expected seconds, since some runs are much longer."""

    def __init__(self, children: Children, repeat: int) -> None:
        self.repeat = repeat
        self._children = children
        self._bar = tqdm(total=0, desc="Measuring", disable=True)

    def show(self, seconds: float) -> None:
        """Show a progress bar for runs that are expected to take `seconds` in all."""
        layout = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left{postfix}"
        self._bar = tqdm(total=round(seconds, 1), desc="Measuring", bar_format=layout, disable=None)

    def close(self) -> None:
        self._bar.close()

    def measure(self, name: str, runs: Sequence[Runs], warm_up: bool = True, expected: float = 0) -> None:
        """Measure each `repeat` times, in turn, with `warm_up` after a run that does not count.

        expected: the seconds that all runs should take.
        """
        self._bar.set_postfix_str(name)
        numbers = range(-1 if warm_up else 0, self.repeat)
        for number in numbers:
            for one in runs:
                rate = self._run(one, number)
                if rate is not None and number >= 0:
                    one.cell.runs.append(rate)
                self.advance(expected / (len(numbers) * len(runs)))

    def advance(self, seconds: float) -> None:
        """Advance the progress bar by work that was expected to take `seconds`."""
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
