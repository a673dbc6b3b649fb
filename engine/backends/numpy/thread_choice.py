"""How many BLAS threads steps take: one or all, whichever is faster on this machine, as busy as it is now.

A step waits for the last of its threads at each of its products, over a hundred times. Where every core is free, all of
them are faster; where others compute as well, the last thread is often one that has just lost its core, and a step can
take ten times as long with all threads as with one.

Products may be rounded otherwise with another number of threads. So the number changes seldom, and never where it was
set.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

from engine.backends.numpy.cores import Cores
from engine.backends.ops import Result
from engine.outputs import Threads

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_STEPS = 6  # with either number, in a comparison
_CLEARLY = 2.0  # all of at least two steps so many times slower than the others end a comparison early
_BETTER = 0.8  # of the present number's time: what another one has to stay below
_RECENT = 8  # steps whose median is the present speed
_SLOWED = 2.0  # times slower than it was: reason for a comparison
_AGAIN, _AT_MOST = 256, 4096  # steps until the next comparison without a reason; twice as many after each that agrees


class ThreadChoice:
    """Whether steps of about as many sequences take one thread or all: `number` is that of the next step."""

    def __init__(self, every: int):
        """every: all threads, two or more."""
        self._every = every
        self.chosen = every  # what steps take outside a comparison
        self._is_warm = False  # the first step finds nothing in the caches
        self._times: dict[int, list[float]] | None = {1: [], every: []}  # seconds, while they are compared
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
        """Count the seconds that the step with `number` threads took."""
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
    """The number of threads of one engine's steps. One thread at a time calls `run`: who has the engine."""

    def __init__(self, cores: Cores, is_set: bool, clock: Callable[[], float] = time.perf_counter):
        """is_set: whether the user has set a number. Then, or where a variable has, nothing is measured."""
        self._cores, self._clock = cores, clock
        set_by = ["the setting threads"] if is_set else [name for name in _VARIABLES if os.environ.get(name)]
        self._set_by = set_by[0] if set_by else ""
        self._choices: dict[tuple[int, int], ThreadChoice] = {}
        self._last: ThreadChoice | None = None

    def run(self, rows: int, work: Callable[[], Result]) -> Result:
        """Do `work`, a step of `rows` sequences, with the number of threads chosen for it; returns its result."""
        every = self._cores.number
        if self._set_by or every == 1:
            return work()
        # More sequences are more work between two waits: each doubling has a choice of its own.
        choice = self._choices.setdefault((rows.bit_length(), every), ThreadChoice(every))
        with self._cores.one_each() if choice.number == 1 else nullcontext():
            started = self._clock()
            result = work()
            choice.took(self._clock() - started)
        self._last = choice
        return result

    def now(self) -> Threads:
        """How many threads the last step took, and why."""
        every = self._cores.number
        if self._set_by or every == 1:
            return Threads(every, f"by {self._set_by}" if self._set_by else "BLAS has no more")
        if self._last is None or not self._last.medians:
            return Threads(every, "not measured yet")
        said = ", ".join(f"{1000 * seconds:.1f} ms with {n}" for n, seconds in self._last.medians.items())
        return Threads(self._last.chosen, f"a step took {said}")
