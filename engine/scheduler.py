"""Who computes next. Sequences here are integers: ids, counts and states."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been generated behind it."""

    prompt: tuple[int, ...]
    max_tokens: int  # to generate; −1: no limit
    ids: list[int] = field(default_factory=list)  # prompt and generated
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class Scheduler:
    """First come, first served, one at a time."""

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def submit(self, sequence: Sequence) -> None:
        self._queue.append(sequence)

    def schedule(self) -> Sequence | None:
        """The sequence that the next unit of work belongs to; None when there is nothing to do."""
        return self._queue[0] if self._queue else None

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence; the next one takes its place."""
        if sequence in self._queue:
            self._queue.remove(sequence)
