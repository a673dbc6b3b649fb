"""Counters of the server's requests, tokens and seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine import Chunk


@dataclass(frozen=True)
class Snapshot:
    """The counters at one moment. Seconds and tokens count from the server's start."""

    requests: Mapping[
        str, int
    ]  # by how they ended: "stop", "length", "saved", "cancelled", "error", a refusal's code, …
    active: int  # under way: waiting, computed, or being sent
    prompt_tokens: int
    cached_tokens: int  # of answers that came to their end, as the two below
    prefill_seconds: float
    generation_seconds: float
    completion_tokens: int
    seconds: float  # from arrival to the end, summed over requests


@dataclass
class Totals:
    """The running counters; only the event loop writes them."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    generation_seconds: float = 0.0
    completion_tokens: int = 0
    seconds: float = 0.0
    answers: int = 0  # generation requests that have ended
    answer_seconds: float = 0.0  # their part of `seconds`

    def ended(self, outcome: str, seconds: float, *, answer: bool) -> None:
        """Count a request that has ended; answer: whether it counts in the mean time of an answer."""
        self.requests[outcome] += 1
        self.seconds += seconds
        if answer:
            self.answers += 1
            self.answer_seconds += seconds

    def count(self, chunk: Chunk) -> None:
        """Add a chunk's tokens and usage."""
        self.completion_tokens += len(chunk.token_ids)
        if chunk.usage is not None:
            self.cached_tokens += chunk.usage.cached_tokens
            self.prefill_seconds += chunk.usage.prefill_seconds
            self.generation_seconds += chunk.usage.generation_seconds

    def usual_seconds(self) -> int:
        """The mean time that an answer has taken so far, rounded up; at least 1 and at most 60."""
        return min(60, max(1, math.ceil(self.answer_seconds / max(1, self.answers))))

    def snapshot(self, active: int) -> Snapshot:
        """The counters as they are now."""
        return Snapshot(
            requests=dict(self.requests),
            active=active,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prefill_seconds=self.prefill_seconds,
            generation_seconds=self.generation_seconds,
            completion_tokens=self.completion_tokens,
            seconds=self.seconds,
        )
