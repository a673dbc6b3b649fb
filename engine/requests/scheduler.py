"""Scheduler: chooses the next unit of work, by priority, then first come, first served. It handles ids, counts and
states, no arrays.

    submit → waiting ─ admit ─▶ prefilling (one at a time) ─ end_prefill ─▶ running ─ remove
                ▲                    │                             │
                └─────────────── requeue, preempt ─────────────────┘

A sequence that lacks few tokens is prefilled without a unit: they are rows of its first step.

While both have work, prefill gets a share of the time, by how many wait for it, of all; but at least `_LEAST_SHARE`, at
most `_MOST_SHARE`, and no more than half if running sequences got a token less often than every `GAP` seconds. Between
two steps its budget is the median step's time in that proportion, times `_CATCH_UP`, minus the time that the last step
took beyond the median, and minus the time that the next one will take beyond it to encode a block that it fills. A unit
that starts within the budget may exceed it. A batch of prompts that has the step of the running sequences, too, is due
again at once.

When blocks run out, the last sequence in this order is preempted: it gives up its blocks and waits. The first always
runs, so every sequence becomes the first eventually, and finishes, unless others of a better priority keep coming.
Sequences in the background come after all others, and are preempted for one that waits, too.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from statistics import median

_RECENT = 8  # latest steps, whose median is taken
_LEAST_SHARE, _MOST_SHARE = 0.5, 0.9  # prefill's share of the time, while both have work
GAP = 0.05  # seconds between two steps that more than the least share may take
_JOINING = 16  # rows of prompts in the next step, after which no other sequence joins it
_CATCH_UP = 1.5  # prefill's budget between two steps, in multiples of its share


@dataclass(eq=False)
class TokenSequence:
    """The token ids of a prompt and of the answer so far. The rows of images have ids that no token has."""

    prompt: tuple[int, ...]
    max_tokens: int  # most tokens to generate
    ids: list[int] = field(default_factory=list)  # prompt and generated
    finish_reason: str | None = None
    in_background: bool = False  # whether it computes only where no other waits
    arrival: int = -1  # counts submissions
    text_from: int = 0  # from here on there are tokens alone: the end of the last image
    priority: int = 0  # the least is served first

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
    """A unit of work: a part of a sequence's prefill, or a step of all running sequences.

    sequences: in the order of service. A unit of prefill is for the first one; prompts of the others may join it, and
    steps of the sequences that run.
    """

    is_prefill: bool
    sequences: tuple[TokenSequence, ...]
    running: tuple[TokenSequence, ...] = ()
    fills_a_block: bool = False


class Scheduler:
    """The queue of sequences. At most `parallel` of them run at a time; the others wait."""

    def __init__(self, parallel: int, block_size: int = 64) -> None:
        self.parallel = parallel
        self._block_size = block_size
        self._arrivals = 0
        self._waiting: list[TokenSequence] = []  # in the order of service
        self._prefilling: TokenSequence | None = None
        self._running: list[TokenSequence] = []  # in the order of service
        self._out_of_room = False  # admit no sequence until another is removed
        self._prefill_ahead = 0.0  # seconds that prefill has had beyond its share, while steps waited for it
        self._prefill_since = 0.0  # seconds that prefill has had since the last step
        self._steps: deque[float] = deque(maxlen=_RECENT)  # seconds of recent steps
        self._usual: float | None = None  # the median of these
        self._filling_steps: deque[float] = deque(maxlen=_RECENT)  # seconds of recent steps that filled a block
        self._joining = 0  # rows of prompts in the next step
        self._has_step = False  # whether the unit of prefill under way is a step, too

    def submit(self, sequence: TokenSequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        bisect.insort(self._waiting, sequence, key=_place)

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
        return self._usual if self._running else None

    @property
    def prefill_follows(self) -> bool:
        """Whether prefill is due after the step under way, if that is a usual one."""
        is_wanted = self._prefilling is not None or self._next_waiting() is not None
        is_due = self._prefill_ahead <= (self.usual_step or 0.0) * self._share or not self._competes
        return self.hinderer is not None or (is_wanted and is_due)

    @property
    def _competes(self) -> bool:
        """Whether a prefill has to share the time with steps: not with those of the background alone, unless it is one
        of the background."""
        candidate = self._prefilling or self._next_waiting()
        return (
            candidate is not None and bool(self._running) and self._running[0].in_background <= candidate.in_background
        )

    def schedule(self, *, in_step: bool = False) -> Unit | None:
        """Return the next unit of work; None if there is none. in_step: a step has begun and goes before a prefill."""
        candidate = self._prefilling or self._next_waiting()
        if not self._competes:
            self._prefill_ahead = 0.0
        if candidate is not None and not in_step and (not self._competes or self._prefill_is_due):
            room = self.parallel - len(self._running)
            others = [one for one in self._waiting[:room] if one.in_background == candidate.in_background]
            waiting = (candidate,) if self._prefilling is not None else tuple(others)
            return Unit(True, waiting, tuple(self._running))
        self._joining = 0
        return Unit(False, tuple(self._running), fills_a_block=self._step_fills_a_block) if self._running else None

    @property
    def _prefill_is_due(self) -> bool:
        if self._prefill_ahead > 0 or self._usual is None or self._joining >= _JOINING:
            return False
        share, usual = self._share, self._usual
        budget = _CATCH_UP * share / (1 - share) * usual - max(0.0, self._steps[-1] - usual)
        if self._filling_steps and self._step_fills_a_block:
            budget -= max(0.0, median(self._filling_steps) - usual)
        return self._prefill_since < budget

    @property
    def _share(self) -> float:
        waiting = min(len(self._waiting) + self.prefilling, self.parallel - len(self._running))
        most_share = min(_MOST_SHARE, GAP / (GAP + _CATCH_UP * (self.usual_step or 0.0)))  # then the budget is `GAP`
        return max(_LEAST_SHARE, min(most_share, waiting / max(1, waiting + len(self._running))))

    @property
    def _step_fills_a_block(self) -> bool:
        return any(len(sequence.ids) % self._block_size == 0 for sequence in self._running)

    def take_step(self) -> None:
        """Note that the unit of prefill under way is a step, too, so that running sequences do not wait for it."""
        self._has_step, self._joining = True, 0

    def record_time(self, unit: Unit, seconds: float) -> None:
        share, has_step, self._has_step = self._share, self._has_step, False
        if has_step:
            self._prefill_since = 0.0
        elif unit.is_prefill:
            self._prefill_ahead += seconds * (1 - share)
            self._prefill_since += seconds
        else:
            self._prefill_ahead -= seconds * share
            self._prefill_since = 0.0
            self._steps.append(seconds)
            self._usual = median(self._steps)
            if unit.fills_a_block:
                self._filling_steps.append(seconds)

    def _next_waiting(self) -> TokenSequence | None:
        if self._out_of_room or not self._waiting or len(self._running) >= self.parallel:
            return None
        return self._waiting[0]

    def admit(self, sequence: TokenSequence) -> None:
        """Make a waiting sequence, which has its blocks now, the prefilling one. Does nothing if it is that already."""
        if self._prefilling is None:
            self._waiting.remove(sequence)
            self._prefilling = sequence

    def end_prefill(self, sequence: TokenSequence, missing: int = 0) -> None:
        """Let a sequence that waits or is prefilled take part in steps: its prompt is in the store, but for `missing`
        tokens."""
        if sequence is self._prefilling:
            self._prefilling = None
        else:
            self._waiting.remove(sequence)
        self._joining += missing
        bisect.insort(self._running, sequence, key=_place)

    def requeue(self, sequence: TokenSequence) -> bool:
        """Let a sequence wait until another is removed and frees blocks. False if no sequence runs."""
        if sequence is self._prefilling:
            self._prefilling = None
            bisect.insort(self._waiting, sequence, key=_place)
        self._out_of_room = bool(self._running)
        return self._out_of_room

    def preempt(self) -> TokenSequence | None:
        """Preempt the last sequence in the order of service and return it. It waits until another is removed. None if
        only one computes."""
        computing = [*self._running, *([self._prefilling] if self._prefilling else [])]
        if len(computing) < 2:
            return None
        last = max(computing, key=_place)
        self.suspend(last)
        self._out_of_room = True
        return last

    @property
    def hinderer(self) -> TokenSequence | None:
        """The sequence in the background that the first waiting one, which is not, waits for; None if there is none."""
        if not self._waiting or self._waiting[0].in_background:
            return None
        if self._prefilling is not None and self._prefilling.in_background:
            return self._prefilling
        is_full = self._out_of_room or len(self._running) + self.prefilling >= self.parallel
        return self._running[-1] if is_full and self._running and self._running[-1].in_background else None

    def suspend(self, sequence: TokenSequence) -> None:
        """Let a computing sequence wait, so that another may be admitted."""
        self.remove(sequence)
        bisect.insort(self._waiting, sequence, key=_place)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a finished or cancelled sequence, so that another may be admitted."""
        self._out_of_room = False
        if sequence is self._prefilling:
            self._prefilling = None
        for group in (self._waiting, self._running):
            if sequence in group:
                group.remove(sequence)


def _place(sequence: TokenSequence) -> tuple[bool, int, int]:
    """What sequences are served in the order of."""
    return sequence.in_background, sequence.priority, sequence.arrival
