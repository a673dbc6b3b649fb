"""Seconds of units of work, also of those that a GPU computes after the host has gone on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from polarlm.engine.backends.ops import Ops
from polarlm.engine.requests.request import Request
from polarlm.engine.requests.scheduler import Scheduler, Unit


class _UnderWay(NamedTuple):
    """A unit of a prompt that the host has launched. started, seconds: the host's. begin, end: see `Ops.moment`."""

    unit: Unit
    request: Request
    started: float
    seconds: float
    begin: Any
    end: Any


class Times:
    """Records the times of a `Runner`'s units, in the scheduler and in the clocks of requests.

    Only tokens make the host wait for the device. A step may begin while the device computes a prompt; once the step's
    tokens arrive, the device's time for the prompt is known, and is not the step's.
    """

    def __init__(self, ops: Ops, scheduler: Scheduler) -> None:
        self._ops, self._scheduler = ops, scheduler
        self._under_way: deque[_UnderWay] = deque()
        self._free = 0.0  # when the device had ended the last unit whose time is known

    @property
    def under_way(self) -> int:
        """The number of units whose times are not known yet."""
        return len(self._under_way)

    @property
    def seconds(self) -> float:
        """The seconds since the unit began."""
        return time.perf_counter() - self._started

    def begin(self, unit: Unit, requests: Sequence[Request]) -> None:
        self._unit, self._requests, self._has_tokens = unit, requests, False
        for request in requests:
            request.clock.begin(unit.is_prefill or not request.sequence.generated)
        self._begin, self._started = self._ops.moment(), time.perf_counter()

    def arrived(self) -> None:
        """Tokens of the unit have arrived, so the device has ended all units before it."""
        self._settle()
        late = max(0.0, self._free - self._started)  # the device began the unit so much later than the host
        self._started += late
        for request in self._requests:
            request.clock.skip(late)
        self._has_tokens = True

    def end(self) -> None:
        for request in self._requests:
            request.clock.lap()
        if self._unit.is_prefill and not self._has_tokens:
            (request,), end = self._requests, self._ops.moment()
            self._under_way.append(_UnderWay(self._unit, request, self._started, self.seconds, self._begin, end))
        else:
            self._scheduler.record_time(self._unit, self.seconds)
        self._settle()

    def _settle(self) -> None:
        """Record the times of units that the device has ended."""
        while self._under_way:
            first = self._under_way[0]
            seconds = self._ops.seconds(first.begin, first.end)
            if seconds is None:
                return
            self._under_way.popleft()
            self._free = max(self._free, first.started) + seconds
            self._scheduler.record_time(first.unit, seconds)
            first.request.clock.prefill += seconds - first.seconds
