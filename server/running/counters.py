"""The server's counters of requests, tokens and seconds."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field

from polarlm.engine import Chunk
from polarlm.engine.outputs import Times
from polarlm.server.running.job import Job


@dataclass
class Totals:
    """The counters since the server's start; only the event loop writes them."""

    requests: Counter[str] = field(default_factory=Counter)
    """By outcome: "stop", "length", "saved", "cancelled", "error", a refusal's code, …"""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # this counter and the next five count complete answers only
    cached_from: Counter[str] = field(default_factory=Counter)  # `cached_tokens`, by place
    prefill_seconds: float = 0.0
    generation_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # from arrival to the end, summed over requests
    answers: int = 0  # requests for answers that have ended
    answer_seconds: float = 0.0  # the part of `seconds` that these took
    first_token: Times = field(default_factory=Times)  # from arrival to an answer's first token
    gaps: Times = field(default_factory=Times)  # between the tokens of an answer
    latency: Times = field(default_factory=Times)  # from arrival to the end of an answer
    key_requests: Counter[str] = field(default_factory=Counter)  # requests that have ended, by the name of their key
    key_tokens: Counter[str] = field(default_factory=Counter)  # tokens generated, by the same
    active: int = 0  # in a snapshot: requests that wait, are computed, or are being sent

    def count_end(self, job: Job, *, answer: bool) -> None:
        """Count a request that has ended. answer: whether it counts in the mean time of an answer."""
        seconds = time.monotonic() - job.start_time
        if job.entry.key:
            self.key_requests[job.entry.key] += 1
        self.requests[job.outcome] += 1
        self.seconds += seconds
        if job.outcome in ("stop", "length"):  # a complete answer
            self.latency.add(seconds)
        if answer:
            self.answers += 1
            self.answer_seconds += seconds

    def count(self, chunk: Chunk, job: Job) -> None:
        """Add a chunk's tokens, their times and its usage. job: its request."""
        if tokens := len(chunk.token_ids):
            self.completion_tokens += tokens
            if job.entry.key:
                self.key_tokens[job.entry.key] += tokens
            if job.last_token_time is None:
                self.first_token.add(job.append_time - job.start_time)
            else:  # the tokens of a chunk share the time
                self.gaps.add((job.append_time - job.last_token_time) / tokens, tokens)
            job.last_token_time = job.append_time
        if chunk.usage is not None:
            self.cached_tokens += chunk.usage.cached_tokens
            self.cached_from.update(chunk.usage.cached_from)
            self.prefill_seconds += chunk.usage.prefill_seconds
            self.generation_seconds += chunk.usage.generation_seconds
            self.drafted_tokens += chunk.usage.drafted_tokens
            self.accepted_tokens += chunk.usage.accepted_tokens

    def usual_seconds(self) -> int:
        """The mean time that an answer has taken so far, rounded up; at least 1 and at most 60."""
        return min(60, max(1, math.ceil(self.answer_seconds / max(1, self.answers))))
