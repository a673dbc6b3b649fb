"""Who computes next: first come, first served, many at once. Sequences here are integers: ids, counts and states.

    submit → waiting ─ admit ─▶ prefilling (one at a time) ─ prefilled ─▶ running ─ remove
                ▲                    │                           │
                └────────────────── preempt ─────────────────────┘

Prompts and steps share the time, not the number of units: while both are wanted, prefill gets `prefill_share` of the
seconds. Between two steps it takes no more than steps usually take, in that proportion, and half of that to catch up,
and one unit, less what the last step took longer than usual, and less what the next one will if it fills a block,
which is encoded then: what is slow for once and the prompt's part do not add up.

Where blocks run out, the youngest gives up its own and waits for its turn again: the oldest always goes on, and whoever
waits becomes the oldest in the end.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from statistics import median

_RECENT = 8  # steps whose median is what they usually take
_CATCH_UP = 1.5  # times its share that prefill may take between two steps


@dataclass(eq=False)
class TokenSequence:
    """A prompt and what has been generated behind it."""

    prompt: tuple[int, ...]
    max_tokens: int  # to generate
    ids: list[int] = field(default_factory=list)  # prompt and generated
    finish_reason: str | None = None
    arrival: int = -1  # its number, in the order of submission

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def computable(self) -> int:
        """Tokens that are in the store before the next step: all but the newest, or the prompt."""
        return max(len(self.prompt), len(self.ids) - 1)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Unit:
    """A unit of work: a part of the prompt of one sequence, or a step of each of several."""

    is_prefill: bool
    sequences: tuple[TokenSequence, ...]  # oldest first
    fills_a_block: bool = False


class Scheduler:
    """At most `most` sequences compute at a time; the others wait."""

    def __init__(self, most: int, prefill_share: float = 0.5, block_size: int = 64) -> None:
        self._most = most
        self._prefill_share = prefill_share
        self._block_size = block_size
        self._arrivals = 0
        self._waiting: list[TokenSequence] = []  # by arrival, as `_running`
        self._prefilling: TokenSequence | None = None
        self._running: list[TokenSequence] = []
        self._held = False  # nobody is admitted before somebody has left
        self._prefill_ahead = 0.0  # seconds that prefill has had beyond its share, while steps waited for it
        self._prefill_since = 0.0  # seconds that it has had since the last step
        self._steps: deque[float] = deque(maxlen=_RECENT)  # seconds
        self._filling_steps: deque[float] = deque(maxlen=_RECENT)  # seconds of those that filled a block

    def submit(self, sequence: TokenSequence) -> None:
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(sequence)

    @property
    def running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    def schedule(self) -> Unit | None:
        """The next unit of work; None when there is nothing to do."""
        prompt = self._prefilling or self._next()
        if prompt is None or not self._running:  # nobody to share the time with
            self._prefill_ahead = 0.0
        if prompt is not None and (not self._running or self._prefill_is_due):
            return Unit(True, (prompt,))
        return Unit(False, tuple(self._running), self._step_fills_a_block) if self._running else None

    @property
    def _prefill_is_due(self) -> bool:
        if self._prefill_ahead > 0 or not self._steps:
            return False
        share, usual = self._prefill_share, median(self._steps)
        room = _CATCH_UP * share / (1 - share) * usual - max(0.0, self._steps[-1] - usual)
        if self._filling_steps and self._step_fills_a_block:
            room -= max(0.0, median(self._filling_steps) - usual)
        return self._prefill_since < room

    @property
    def _step_fills_a_block(self) -> bool:
        return any(len(sequence.ids) % self._block_size == 0 for sequence in self._running)

    def spent(self, unit: Unit, seconds: float) -> None:
        """Count the seconds that a unit has taken."""
        share = self._prefill_share
        if unit.is_prefill:
            self._prefill_ahead += seconds * (1 - share)
            self._prefill_since += seconds
        else:
            self._prefill_ahead -= seconds * share
            self._prefill_since = 0.0
            self._steps.append(seconds)
            if unit.fills_a_block:
                self._filling_steps.append(seconds)

    def _next(self) -> TokenSequence | None:
        """Who may be admitted."""
        if self._held or not self._waiting or len(self._running) >= self._most:
            return None
        return self._waiting[0]

    def admit(self, sequence: TokenSequence) -> None:
        """There is room for the sequence, if it has not had it before."""
        if self._prefilling is None:
            self._waiting.remove(sequence)
            self._prefilling = sequence

    def prefilled(self, sequence: TokenSequence) -> None:
        """Its prompt is in the store: it takes part in steps from now on."""
        self._prefilling = None
        bisect.insort(self._running, sequence, key=_arrival)

    def requeue(self, sequence: TokenSequence) -> bool:
        """There is no room for the sequence before somebody leaves. False if nobody runs who could."""
        if sequence is self._prefilling:
            self._prefilling = None
            bisect.insort(self._waiting, sequence, key=_arrival)
        self._held = bool(self._running)
        return self._held

    def preempt(self) -> TokenSequence | None:
        """The youngest that computes goes back to wait until somebody has left; None if there is only one."""
        computing = [*self._running, *([self._prefilling] if self._prefilling else [])]
        if len(computing) < 2:
            return None
        youngest = max(computing, key=_arrival)
        self.remove(youngest)
        bisect.insort(self._waiting, youngest, key=_arrival)
        self._held = True
        return youngest

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a finished or cancelled sequence; others may take its place."""
        self._held = False
        if sequence is self._prefilling:
            self._prefilling = None
        for group in (self._waiting, self._running):
            if sequence in group:
                group.remove(sequence)


def _arrival(sequence: TokenSequence) -> int:
    return sequence.arrival
