"""One machine: it computes prompts one at a time and steps of all running requests, which share its time.

Time is fluid: while a prompt is computed and requests run, the prompt gets `prefill_share` of the time and steps get
the rest. A step gives each running request one token. Its time depends on the number of requests and on their contexts,
each of which counts with its mean length.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from polarlm.bench.serving.simulate.costs import Costs
from polarlm.bench.serving.simulate.tiers import Tiers

NEVER = float("inf")


class Job:
    """A request on a machine."""

    __slots__ = ("answer", "arrived", "context", "conversation", "tokens", "work")

    def __init__(self, conversation: int, arrived: float, system: int, tokens: int, answer: int, work: float) -> None:
        """system: tokens of the system prompt. tokens: those of the conversation so far, the prompt and the answer,
        without the system prompt. work: seconds of the prefill."""
        self.conversation, self.arrived = conversation, arrived
        self.tokens, self.answer, self.work = tokens, answer, work
        self.context = system + tokens - answer / 2  # tokens that a step attends to, on average


@dataclass(frozen=True)
class Settings:
    """The settings of all machines."""

    costs: Costs
    parallel: int
    prefill_share: float = 0.5


class Machine:
    """The state of a machine at the time of the last `advance`. After each change `next_event` must be called again."""

    __slots__ = (
        "_contexts", "_left", "_now", "_prefilling", "_running", "_settings", "_steps", "_waiting",
        "busy", "link_free", "load", "tiers", "version",
    )  # fmt: skip

    def __init__(self, settings: Settings, tiers: Tiers) -> None:
        self._settings, self.tiers = settings, tiers
        self._waiting: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._left = 0.0  # seconds that the prefill still needs if nothing else runs
        self._running: list[tuple[float, int, Job]] = []  # a heap, by the number of a job's last step
        self._steps = 0.0  # steps so far
        self._contexts = 0.0  # tokens that a step attends to
        self._now = 0.0
        self.busy = 0.0  # seconds with work
        self.load = 0  # requests under way
        self.link_free = 0.0  # when its network and disk have finished all transfers
        self.version = 0  # version of the state that the last `next_event` was for

    def _step_seconds(self) -> float:
        costs = self._settings.costs
        return costs.step + costs.sequence * len(self._running) + costs.context_token * self._contexts

    def advance(self, now: float) -> None:
        """Advance the time to `now`, which is not later than the next event."""
        passed, self._now = now - self._now, now
        if passed <= 0:
            return
        share = self._settings.prefill_share
        if self._prefilling is None:
            if self._running:
                self._steps += passed / self._step_seconds()
                self.busy += passed
        elif self._running:
            self._left -= passed * share
            self._steps += passed * (1 - share) / self._step_seconds()
            self.busy += passed
        else:
            self._left -= passed
            self.busy += passed

    def next_event(self) -> float:
        """The time at which a prefill or an answer ends next."""
        share = self._settings.prefill_share
        if self._prefilling is None:
            if not self._running:
                return NEVER
            return self._now + max(0.0, self._running[0][0] - self._steps) * self._step_seconds()
        if not self._running:
            return self._now + max(0.0, self._left)
        prefill = max(0.0, self._left) / share
        step = max(0.0, self._running[0][0] - self._steps) * self._step_seconds() / (1 - share)
        return self._now + min(prefill, step)

    def enqueue(self, job: Job) -> bool:
        """Queue a job at the time of the last `advance`; returns whether a prefill starts at once."""
        self._waiting.append(job)
        return self._admit()

    def _admit(self) -> bool:
        """Start the next prefill if there is a job and room for it; returns whether it started."""
        if self._prefilling is not None or not self._waiting or len(self._running) >= self._settings.parallel:
            return False
        job, store = self._waiting[0], self.tiers.store
        if self._running and store.pinned + job.tokens > store.capacity:
            return False
        self._waiting.popleft()
        self.tiers.pin(job.conversation, job.tokens)
        self._prefilling, self._left = job, job.work
        return True

    def end_what_is_due(self) -> tuple[Job | None, list[Job]]:
        """End the prefill and the answers that are due at the time of the last `advance`. Returns the job that got its
        first token, if any, and the jobs that got their last."""
        first, ended = None, []
        tiny = 1e-9 * (1 + abs(self._now))  # seconds: the rounding error of sums of times
        if self._prefilling is not None and self._left <= tiny:
            first = job = self._prefilling
            self._prefilling = None
            if job.answer <= 1:
                ended.append(job)
            else:
                heapq.heappush(self._running, (self._steps + job.answer - 1, job.conversation, job))
                self._contexts += job.context
        while self._running and (self._running[0][0] - self._steps) * self._step_seconds() <= tiny:
            job = heapq.heappop(self._running)[2]
            self._contexts -= job.context
            ended.append(job)
        for job in ended:
            self.tiers.unpin(job.conversation, job.tokens)
        self._admit()
        return first, ended
