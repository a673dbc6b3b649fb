"""Runs what a measurement consists of while there is time, with progress, and keeps what there is meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from polarlm.engine.cli.progress import counting

K = TypeVar("K")
Clock = Callable[[], float]

_WRITTEN_EVERY = 15  # seconds, where figures come more often


class Workload(NamedTuple):
    """work: about how long it takes, in any unit that all workloads share."""

    name: str
    work: float
    measure: Callable[[], object]


class WorkloadRunner:
    """seconds: the time that there is for everything. write: writes a result, which is complete or not; False where
    there is none yet."""

    def __init__(
        self,
        seconds: float = math.inf,
        write: Callable[[bool], object] = lambda complete: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock, self.write, self._written = clock, write, -math.inf
        self.began = clock()
        self.end = self.began + seconds
        self.left_out: list[str] = []  # names of workloads for which there was no time
        self.work_seconds = 0.0  # of a unit of work, at least
        self._advance: Callable[[str, float], None] = lambda name, amount: None
        self._name, self._begun, self._work, self._done = "", 0.0, 0.0, 0.0

    def seconds_left(self, end: float | None = None) -> float:
        """Seconds until `end`, or until the end of everything; none if that is past."""
        return max(0.0, (self.end if end is None else end) - self._clock())

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self.began

    def share(self, *shares: float) -> float:
        """When these shares of the time before its end begin."""
        return self.end - sum(shares) * (self.end - self.began)

    # -- what was measured -----------------------------------------------------------------------------------------

    def keep(self, take: Callable[[], object] = lambda: None) -> None:
        """Write the result so far, which `take` brings up to date, unless that was done just now."""
        if self._clock() - self._written >= _WRITTEN_EVERY:
            take()
            if self.write(False) is not False:
                self._written = self._clock()

    @contextmanager
    def final_write(self) -> Iterator[None]:
        """A context at whose end the result is written, also after Ctrl-C: then it is not complete."""
        try:
            yield
        except BaseException:
            self.write(False)
            raise
        self.write(not self.left_out)

    # -- workloads and runs ----------------------------------------------------------------------------------------

    def run(self, workloads: Sequence[Workload]) -> None:
        """Measure each workload that there is time for, by the pace of those before it."""
        with counting("Measuring", total=sum(workload.work for workload in workloads)) as self._advance:
            for workload in workloads:
                self._name, self._begun, self._work = workload.name, self._begun + self._work, workload.work
                self.advance(0)
                if workload.work * self.work_seconds > self.seconds_left() or not self.seconds_left():
                    self.left_out.append(workload.name)
                    continue
                began = self._clock()
                workload.measure()
                if self.work_seconds:  # half of it, since contestants may have loaded the model meanwhile
                    self.work_seconds = max(self.work_seconds, (self._clock() - began) / workload.work / 2)

    def advance(self, share: float, name: str = "") -> None:
        """Advance by a share of the current workload. name: of what is measured next."""
        self._name = name or self._name
        to = min(max(self._done, self._begun) + share * self._work, self._begun + self._work)
        self._advance(self._name, to - self._done)
        self._done = to

    def in_turn(self, name: str, keys: Sequence[K], rounds: range, run: Callable[[K, int], object]) -> None:
        """Call `run` with each key and the number of its round, so that a machine that slows down slows all."""
        self.advance(0, name)
        for number in rounds:
            for key in keys:
                run(key, number)
                self.advance(1 / (len(rounds) * len(keys)))
