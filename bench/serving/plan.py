"""The requests for a server, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plan:
    """The requests and their times."""

    clients: int
    starts: Sequence[float]  # seconds from the beginning, ascending
    prompts: Sequence[Sequence[int]]  # ids, one prompt for each start
    max_tokens: int


def poisson(rate: float, seconds: float, most: int | None, rng: np.random.Generator) -> list[float]:
    """The arrival times of a Poisson process with `rate` per second: within `seconds`, and at most `most`."""
    starts: list[float] = []
    at = rng.exponential(1 / rate)
    while at < seconds and (most is None or len(starts) < most):
        starts.append(float(at))
        at += rng.exponential(1 / rate)
    return starts


def prompts(ids: Sequence[int], count: int, shared: int, own: int, rng: np.random.Generator) -> Sequence[Sequence[int]]:
    """`count` prompts of random ids: `shared` ids that are the same in all, then `own` ids of each."""
    prefix = rng.choice(ids, shared).tolist()
    return [prefix + rng.choice(ids, own).tolist() for _ in range(count)]
