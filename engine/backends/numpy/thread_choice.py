"""The number of BLAS threads of steps: one or all, whichever is faster at the machine's present load.

A step waits for the slowest of its threads at each of its products, over a hundred times. With idle cores, all threads
are faster. On a busy machine a thread has often just lost its core, and a step can take ten times as long with all
threads as with one.

The number of threads can change how products are rounded. So it changes seldom, and never if the user has set it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

from polarlm.engine.backends.numpy.cores import Cores
from polarlm.engine.backends.ops import Result
from polarlm.engine.outputs import Threads

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_STEPS = 6  # of a comparison, with each number
_CLEARLY = 2.0  # a comparison ends early if all steps with one number, at least two, are slower by this factor
_BETTER = 0.8  # another number is taken if its time is below this share of the present one's
_RECENT = 8  # steps; their median is the present speed
_SLOWED = 2.0  # a slowdown by this factor starts a comparison
_AGAIN, _AT_MOST = 256, 4096  # steps until the next regular comparison, doubled after each that changes nothing


class ThreadChoice:
    """The choice between one thread and all for steps of similar size; `number` is that of the next step."""

    def __init__(self, every: int):
        """every: the number of all threads, two or more."""
        self._every = every
        self.chosen = every  # number of steps outside a comparison
        self._is_warm = False  # the first step runs with cold caches and is not timed
        self._times: dict[int, list[float]] | None = {1: [], every: []}  # seconds of steps, during a comparison
        self._usual = 0.0  # seconds of a step when the number was chosen
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._since, self._again = 0, _AGAIN
        self.medians: dict[int, float] = {}  # of the last comparison: number → seconds

    @property
    def number(self) -> int:
        """Threads for the next step."""
        if self._times is None or not self._is_warm:
            return self.chosen
        other = self._other
        return other if len(self._times[other]) < len(self._times[self.chosen]) else self.chosen

    def took(self, seconds: float) -> None:
        """Record the seconds of the step that ran with `number` threads."""
        if not self._is_warm:
            self._is_warm = True
        elif self._times is not None:
            self._times[self.number].append(seconds)
            if self._is_settled(*self._times.values()):
                self._choose(self._times)
        else:
            self._recent.append(seconds)
            self._since += 1
            slowed = len(self._recent) == _RECENT and median(self._recent) > _SLOWED * self._usual
            if slowed:
                self._again = _AGAIN
            if slowed or self._since >= self._again:
                self._times = {1: [], self._every: []}

    @property
    def _other(self) -> int:
        return self._every if self.chosen == 1 else 1

    @staticmethod
    def _is_settled(one: list[float], every: list[float]) -> bool:
        if min(len(one), len(every)) < 2:
            return False
        clear = min(one) > _CLEARLY * max(every) or min(every) > _CLEARLY * max(one)
        return clear or min(len(one), len(every)) == _STEPS

    def _choose(self, times: dict[int, list[float]]) -> None:
        first, agrees = not self.medians, True
        self.medians = {number: median(seconds) for number, seconds in times.items()}
        if self.medians[self._other] < _BETTER * self.medians[self.chosen]:
            self.chosen, agrees = self._other, False
        self._again = min(2 * self._again, _AT_MOST) if agrees and not first else _AGAIN
        self._usual = self.medians[self.chosen]
        self._since, self._times = 0, None
        self._recent.clear()


class StepThreads:
    """The number of threads of one engine's steps. Only the thread that holds the engine calls `run`."""

    def __init__(self, cores: Cores, is_set: bool, clock: Callable[[], float] = time.perf_counter):
        """is_set: whether the user has set the number. Nothing is measured then, or if a variable sets it."""
        self._cores, self._clock = cores, clock
        set_by = ["the setting threads"] if is_set else [name for name in VARIABLES if os.environ.get(name)]
        self._set_by = set_by[0] if set_by else ""
        self._choices: dict[tuple[int, int], ThreadChoice] = {}
        self._last: ThreadChoice | None = None

    def run(self, rows: int, work: Callable[[], Result]) -> Result:
        """work(), a step of `rows` rows, with the chosen number of threads."""
        every = self._cores.number
        if self._set_by or every == 1:
            return work()
        # More rows are more work between two waits, so each doubling has a choice of its own.
        choice = self._choices.setdefault((rows.bit_length(), every), ThreadChoice(every))
        with self._cores.one_each() if choice.number == 1 else nullcontext():
            started = self._clock()
            result = work()
            choice.took(self._clock() - started)
        self._last = choice
        return result

    def last(self) -> Threads:
        """The number of threads of the last step, and why."""
        every = self._cores.number
        if self._set_by or every == 1:
            return Threads(every, f"by {self._set_by}" if self._set_by else "BLAS has no more")
        if self._last is None or not self._last.medians:
            return Threads(every, "not measured yet")
        times = ", ".join(f"{1000 * seconds:.1f} ms with {n}" for n, seconds in self._last.medians.items())
        return Threads(self._last.chosen, f"a step took {times}")
