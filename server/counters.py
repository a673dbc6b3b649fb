"""What the server has done so far, as plain numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine import Chunk

_SHORT = {"busy", "closing", "tokenized", "detokenized"}  # outcomes that say nothing of how long answers take


@dataclass(frozen=True)
class Snapshot:
    """The counters at one moment. Seconds and tokens count from the server's start."""

    requests: Mapping[
        str, int
    ]  # by how they ended: "stop", "length", "saved", …, "cancelled", "error", or a refusal's code
    active: int  # under way: waiting, computed, or being sent
    prompt_tokens: int
    cached_tokens: int  # of answers that came to their end, as the two below
    prefill_seconds: float
    generation_seconds: float
    completion_tokens: int
    seconds: float  # from arrival to the end, summed over requests


@dataclass
class Totals:
    """The running counters; the event loop alone writes them."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    generation_seconds: float = 0.0
    completion_tokens: int = 0
    seconds: float = 0.0

    def count(self, chunk: Chunk) -> None:
        """Add what a chunk brings."""
        self.completion_tokens += len(chunk.token_ids)
        if chunk.usage is not None:
            self.cached_tokens += chunk.usage.cached_tokens
            self.prefill_seconds += chunk.usage.prefill_seconds
            self.generation_seconds += chunk.usage.generation_seconds

    def usual_seconds(self) -> int:
        """How long a request has taken so far, rounded up; at least 1 and at most 60."""
        served = sum(count for outcome, count in self.requests.items() if outcome not in _SHORT)
        return min(60, max(1, math.ceil(self.seconds / max(1, served))))

    def snapshot(self, active: int) -> Snapshot:
        """The counters as they are now."""
        return Snapshot(**{**vars(self), "requests": dict(self.requests)}, active=active)
