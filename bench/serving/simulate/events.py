"""The simulation: requests arrive, are routed, find part of their prompt in a tier, and are computed.

Each request puts at most five events on the heap: its arrival, the end of its transfer from a slower tier, the start
and the end of its prefill, and the end of its answer. So the time depends on the number of requests, not of machines.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from polarlm.bench.serving.simulate.machine import NEVER, Job, Machine, Settings
from polarlm.bench.serving.simulate.routing import ROUTERS
from polarlm.bench.serving.simulate.tiers import NAMES, STORE, Tier, Tiers, TierSize
from polarlm.bench.serving.simulate.trace import Trace

MOST_EVENTS = 5  # most events of a request
_ARRIVAL, _READY, _MACHINE = range(3)
_OTHERS, _OTHER_KEYS = 16, 1 << 20  # number and first key of the entries that fill a store at the start


@dataclass(frozen=True)
class Fleet:
    """Identical machines. sizes: of the store, host memory and disk; remote: of the tier that all share."""

    machines: int
    settings: Settings
    sizes: Sequence[TierSize]
    remote: TierSize | None = None
    routing: str = "affinity"
    request_seconds: float = 0.0  # further seconds of every request: HTTP, template, tokenizer


@dataclass
class Result:
    """The results for requests that arrived from time 0 on; arrived, finished, under_way and events count all.

    waits: seconds to the first token; for requests without one, seconds waited so far.
    """

    waits: np.ndarray
    whole: np.ndarray  # seconds from arrival to the last token, for answers that ended
    prompt_tokens: int
    hits: dict[str, int]  # tier → tokens of prompts that it had
    answer_tokens: int  # tokens of answers that ended
    seconds: float
    busy: float  # share of the machines' time with work
    arrived: int
    finished: int
    under_way: int
    events: int

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that any tier had."""
        return sum(self.hits.values()) / max(1, self.prompt_tokens)

    def wait(self, percent: float) -> float:
        """A percentile of the seconds to the first token."""
        return float(np.percentile(self.waits, percent)) if len(self.waits) else NEVER


@dataclass
class _Measured:
    """Measurements from time 0 on."""

    waits: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    pending: dict[Job, None] = field(default_factory=dict)  # jobs without a first token, in order of arrival
    hits: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    prompt_tokens: int = 0
    answer_tokens: int = 0


class Simulation:
    """A trace on a fleet, from the trace's start, which may be before time 0, to `end`."""

    def __init__(self, trace: Trace, fleet: Fleet, end: float, seed: int = 0) -> None:
        self._trace, self._fleet, self._end = trace, fleet, end
        self._remote = None if fleet.remote is None else Tier(fleet.remote.tokens)
        self._machines = [Machine(fleet.settings, Tiers(fleet.sizes, self._remote)) for _ in range(fleet.machines)]
        self._router = ROUTERS[fleet.routing](fleet.machines, seed)
        self._tiers = [*fleet.sizes, *([TierSize(0)] * (len(NAMES) - 1 - len(fleet.sizes)))]
        self._tiers.append(fleet.remote or TierSize(0))
        self._heap: list[tuple[float, int, int, int, object]] = []  # time, order, kind, machine or conversation, more
        self._events = 0
        # Lists, since single elements of arrays are slow to read.
        self._first, self._prompt = trace.first.tolist(), trace.prompt.tolist()
        self._answer, self._pause = trace.answer.tolist(), trace.pause.tolist()
        self._system, self._system_tokens = trace.system.tolist(), trace.system_tokens.tolist()
        self._turn = list(self._first[:-1])  # the next turn of each conversation
        self._history = trace.history.tolist()  # tokens of each conversation so far
        self._arrived = self._finished = 0
        self._measured = _Measured()
        self._place_histories()

    def _place_histories(self) -> None:
        """Put the histories of conversations on the machines to which the router would have sent them."""
        for machine in self._machines:
            size = machine.tiers.store.capacity / _OTHERS
            if size < NEVER:
                for number in range(_OTHERS):  # entries of conversations that have ended
                    machine.tiers.put(-_OTHER_KEYS - number, int(size))
        for conversation, tokens in enumerate(self._history):
            if tokens:
                tiers = self._machines[self._router.choose(conversation)].tiers
                system = self._system[conversation]
                tiers.put(-1 - system, self._system_tokens[system])
                tiers.put(conversation, tokens)
                tiers.share(conversation, tokens)

    def run(self) -> Result:
        """Simulate until `end`."""
        enabled = gc.isenabled()
        gc.disable()  # there are no cycles, and searching so many objects for them takes most of the time
        try:
            return self._run()
        finally:
            if enabled:
                gc.enable()

    def _run(self) -> Result:
        begins = self._trace.begins.tolist()
        begun, heap, machines = 0, self._heap, self._machines
        while True:
            if begun < len(begins) and (not heap or begins[begun] <= heap[0][0]):
                now, what, which, more = begins[begun], _ARRIVAL, begun, None
                begun += 1
                self._events += 1
            elif heap:
                now, _, what, which, more = heapq.heappop(heap)
            else:
                break
            if now > self._end:
                break
            if what == _ARRIVAL:
                self._arrive(now, which)
            elif what == _READY:
                assert isinstance(more, Job)
                self._enqueue(now, which, more)
            elif machines[which].version == more:
                machine = machines[which]
                machine.advance(now)
                self._end_jobs(now, which, machine)
                self._schedule(which, machine)
        return self._result()

    def _push(self, time: float, what: int, which: int, more: object = None) -> None:
        self._events += 1
        heapq.heappush(self._heap, (time, self._events, what, which, more))

    def _schedule(self, which: int, machine: Machine) -> None:
        machine.version += 1
        time = machine.next_event()
        if time < NEVER:
            self._push(time, _MACHINE, which, machine.version)

    def _arrive(self, now: float, conversation: int) -> None:
        which = self._router.choose(conversation)
        machine = self._machines[which]
        self._arrived += 1
        machine.load += 1
        self._router.changed(which, machine.load)
        system = self._system[conversation]
        turn = self._turn[conversation]
        self._turn[conversation] += 1
        own, history = self._prompt[turn], self._history[conversation]
        system_tokens, answer = self._system_tokens[system], self._answer[turn]
        pieces = [(-1 - system, system_tokens), (conversation, history)]
        found, cached, transfer = self._find(now, machine, pieces)
        whole = system_tokens + history + own
        machine.tiers.put(-1 - system, system_tokens)
        machine.tiers.share(-1 - system, system_tokens)
        self._history[conversation] = history + own + answer
        work = self._fleet.settings.costs.prefill(whole - cached, cached) + self._fleet.request_seconds
        job = Job(conversation, now, system_tokens, history + own + answer, answer, work)
        if now >= 0:
            measured = self._measured
            measured.pending[job] = None
            measured.prompt_tokens += whole
            for level, tokens in found:
                measured.hits[level] += tokens
        if transfer:
            machine.link_free = max(machine.link_free, now) + transfer
            self._push(machine.link_free, _READY, which, job)
        else:
            self._enqueue(now, which, job)

    def _find(
        self, now: float, machine: Machine, pieces: Sequence[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], int, float]:
        """[(tier, tokens)] that are faster to fetch than to compute, the sum of tokens, seconds of the transfers."""
        found, cached, transfer = [], 0, 0.0
        wait = max(0.0, machine.link_free - now)  # until transfers of other requests have ended
        for key, tokens in pieces:
            if tokens == 0:
                continue
            level, known = machine.tiers.find(key)
            if level < 0:
                break
            known = min(known, tokens)
            if level != STORE:
                size = self._tiers[level]
                seconds = size.latency + known / size.tokens_per_second
                if wait + seconds > self._fleet.settings.costs.prefill(known, cached):
                    break
                transfer += seconds
                wait = 0.0
            found.append((level, known))
            cached += known
        return found, cached, transfer

    def _enqueue(self, now: float, which: int, job: Job) -> None:
        machine = self._machines[which]
        machine.advance(now)
        if machine.enqueue(job):
            self._schedule(which, machine)

    def _end_jobs(self, now: float, which: int, machine: Machine) -> None:
        first, ended = machine.end_what_is_due()
        measured = self._measured
        if first is not None and first in measured.pending:
            del measured.pending[first]
            measured.waits.append(now - first.arrived)
        for job in ended:
            conversation = job.conversation
            self._finished += 1
            machine.load -= 1
            machine.tiers.share(conversation, job.tokens)
            if job.arrived >= 0:
                measured.answer_tokens += job.answer
                measured.whole.append(now - job.arrived)
            turn = self._turn[conversation]
            if turn < self._first[conversation + 1]:
                self._push(now + self._pause[turn], _ARRIVAL, conversation)
        if ended:
            self._router.changed(which, machine.load)

    def _result(self) -> Result:
        measured, end = self._measured, self._end
        waits = np.array([*measured.waits, *(end - job.arrived for job in measured.pending)])
        begin = min(0.0, float(self._trace.begins[0])) if len(self._trace.begins) else 0.0
        for machine in self._machines:
            machine.advance(end)
        return Result(
            waits=waits,
            whole=np.array(measured.whole),
            prompt_tokens=measured.prompt_tokens,
            hits=dict(zip(NAMES, measured.hits, strict=True)),
            answer_tokens=measured.answer_tokens,
            seconds=end,
            busy=sum(machine.busy for machine in self._machines) / ((end - begin) * len(self._machines)),
            arrived=self._arrived,
            finished=self._finished,
            under_way=sum(machine.load for machine in self._machines),
            events=self._events,
        )
