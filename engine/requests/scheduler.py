"""Scheduler: chooses the next unit of work, first come, first served. It handles ids, counts and states, no arrays.

    submit → waiting ─ admit ─▶ prefilling (one at a time) ─ prefilled ─▶ running ─ remove
                ▲                    │                           │
                └─────────────── requeue, preempt ───────────────┘

A sequence that lacks a few tokens is prefilled without a unit: these tokens are rows of its first step.

While both have work, prefill gets a share of the time: that of the sequences which wait for it, but at least half, and
at most `_MOST_SHARE`, or what leaves running sequences a token every `_GAP` seconds. Between two steps its budget is
the median step's time in that proportion, times `_CATCH_UP`, minus the time that the last step took beyond the median,
and minus the time that the next one will take beyond it to encode a block that it fills. A unit that starts within the
budget may exceed it. Units whose times are not known yet count as the longest of the latest ones.

When blocks run out, the youngest sequence is preempted: it gives up its blocks and waits. The oldest always runs, so
every sequence becomes the oldest eventually, and finishes.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from statistics import median

_RECENT = 8  # latest steps, whose median is taken, and latest units of prefill
_LEAST_SHARE, _MOST_SHARE = 0.5, 0.9  # prefill's share of the time, while both have work
_GAP = 0.05  # seconds between two steps that more than the least share of prefill may take
_MOST_JOINING = 16  # rows of prompts that the next step has, after which no other sequence joins it
_CATCH_UP = 1.5  # prefill's budget between two steps, in multiples of its share


@dataclass(eq=False)
class TokenSequence:
    """The token ids of a prompt and of the answer so far."""

    prompt: tuple[int, ...]
    max_tokens: int  # most tokens to generate
    ids: list[int] = field(default_factory=list)  # prompt and generated
    finish_reason: str | None = None
    arrival: int = -1  # counts submissions

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def computable(self) -> int:
        """Tokens that must be in the store before the next step: the prompt, later all but the newest token."""
        return max(len(self.prompt), len(self.ids) - 1)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Unit:
    """A unit of work: a part of one sequence's prefill, or a step of all running sequences."""

    is_prefill: bool
    sequences: tuple[TokenSequence, ...]  # oldest first
    fills_a_block: bool = False


class Scheduler:
    """The queue of sequences. At most `parallel` of them run at a time; the others wait."""

    def __init__(self, parallel: int, block_size: int = 64) -> None:
        self._parallel = parallel
        self._block_size = block_size
        self._arrivals = 0
        self._waiting: list[TokenSequence] = []  # by arrival
        self._prefilling: TokenSequence | None = None
        self._running: list[TokenSequence] = []  # by arrival
        self._out_of_room = False  # admit no sequence until another is removed
        self._prefill_ahead = 0.0  # seconds that prefill has had beyond its share, while steps waited for it
        self._prefill_since = 0.0  # seconds that prefill has had since the last step
        self._steps: deque[float] = deque(maxlen=_RECENT)  # seconds of recent steps
        self._filling_steps: deque[float] = deque(maxlen=_RECENT)  # seconds of recent steps that filled a block
        self._prefills: deque[float] = deque(maxlen=_RECENT)  # seconds of recent units of prefill
        self._joining = 0  # rows of prompts that the next step has

    def submit(self, sequence: TokenSequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(sequence)

    @property
    def running(self) -> int:
        """How many sequences take part in steps."""
        return len(self._running)

    @property
    def prefilling(self) -> int:
        """How many prompts are being computed: one or none."""
        return int(self._prefilling is not None)

    @property
    def usual_step(self) -> float | None:
        """The seconds of a usual step; None if no sequence runs or none has taken a step yet."""
        return median(self._steps) if self._running and self._steps else None

    @property
    def prefill_follows(self) -> bool:
        """Whether prefill is due after the step under way, if that takes as long as usual."""
        if self._prefilling is None and self._next_waiting() is None or not self._steps:
            return False
        usual = median(self._steps)
        return self._is_due(self._prefill_ahead - usual * self._share, 0.0, usual)

    def schedule(self, *, in_step: bool = False, under_way: int = 0) -> Unit | None:
        """Return the next unit of work; None if there is none. in_step: a step has begun and goes before a prefill.
        under_way: units of prefill since the last step whose times are not known yet."""
        candidate = self._prefilling or self._next_waiting()
        if candidate is None or not self._running:  # prefill and steps do not compete
            self._prefill_ahead = 0.0
        if candidate is not None and not in_step and (not self._running or self._prefill_is_due(under_way)):
            return Unit(True, (candidate,))
        self._joining = 0
        return Unit(False, tuple(self._running), self._step_fills_a_block) if self._running else None

    def _prefill_is_due(self, under_way: int) -> bool:
        if not self._steps or self._joining >= _MOST_JOINING or (under_way and not self._prefills):
            return False
        more = under_way * max(self._prefills) if under_way else 0.0
        return self._is_due(self._prefill_ahead + more * (1 - self._share), self._prefill_since + more, self._steps[-1])

    def _is_due(self, ahead: float, since: float, last: float) -> bool:
        """Whether prefill is due that is `ahead` of its share and has had `since` since a step of `last` seconds."""
        usual, share = median(self._steps), self._share
        budget = _CATCH_UP * share / (1 - share) * usual - max(0.0, last - usual)
        if self._filling_steps and self._step_fills_a_block:
            budget -= max(0.0, median(self._filling_steps) - usual)
        return ahead <= 0 and since < budget

    @property
    def _share(self) -> float:
        running = len(self._running)
        waiting = min(len(self._waiting) + self.prefilling, self._parallel - running)
        share = min(waiting / max(1, waiting + running), _MOST_SHARE)
        if self._steps:
            most = _GAP / (_CATCH_UP * max(median(self._steps), 1e-9))  # in proportion to the time of steps
            share = min(share, most / (1 + most))
        return max(share, _LEAST_SHARE)

    @property
    def _step_fills_a_block(self) -> bool:
        return any(len(sequence.ids) % self._block_size == 0 for sequence in self._running)

    def record_time(self, unit: Unit, seconds: float) -> None:
        share = self._share
        if unit.is_prefill:
            self._prefill_ahead += seconds * (1 - share)
            self._prefill_since += seconds
            self._prefills.append(seconds)
        else:
            self._prefill_ahead -= seconds * share
            self._prefill_since = 0.0
            self._steps.append(seconds)
            if unit.fills_a_block:
                self._filling_steps.append(seconds)

    def _next_waiting(self) -> TokenSequence | None:
        if self._out_of_room or not self._waiting or len(self._running) >= self._parallel:
            return None
        return self._waiting[0]

    def admit(self, sequence: TokenSequence) -> None:
        """Make a waiting sequence, which has its blocks now, the prefilling one. Does nothing if it is that already."""
        if self._prefilling is None:
            self._waiting.remove(sequence)
            self._prefilling = sequence

    def prefilled(self, sequence: TokenSequence, missing: int = 0) -> None:
        """Let a sequence take part in steps: its prompt is in the store, but for `missing` tokens."""
        self._prefilling = None
        self._joining += missing
        bisect.insort(self._running, sequence, key=_arrival)

    def requeue(self, sequence: TokenSequence) -> bool:
        """Let a sequence wait until another is removed and frees blocks. False if no sequence runs."""
        if sequence is self._prefilling:
            self._prefilling = None
            bisect.insort(self._waiting, sequence, key=_arrival)
        self._out_of_room = bool(self._running)
        return self._out_of_room

    def preempt(self) -> TokenSequence | None:
        """Preempt the youngest sequence and return it. It waits until another is removed. None if only one computes."""
        computing = [*self._running, *([self._prefilling] if self._prefilling else [])]
        if len(computing) < 2:
            return None
        youngest = max(computing, key=_arrival)
        self.remove(youngest)
        bisect.insort(self._waiting, youngest, key=_arrival)
        self._out_of_room = True
        return youngest

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a finished or cancelled sequence, so that another may be admitted."""
        self._out_of_room = False
        if sequence is self._prefilling:
            self._prefilling = None
        for group in (self._waiting, self._running):
            if sequence in group:
                group.remove(sequence)


def _arrival(sequence: TokenSequence) -> int:
    return sequence.arrival
