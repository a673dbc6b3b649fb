"""The random numbers of a request: one for each token, whether it was sampled, forced or drafted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from polarlm.engine import SamplingParams
from polarlm.engine.requests.sampler import Sampler
from polarlm.engine.requests.scheduler import TokenSequence
from polarlm.engine.sampling.sample import resolve
from polarlm.model_loaders.config import GenerationDefaults


def test_they_are_the_seeds_in_order() -> None:
    """However many are drawn at once, and however far ahead of the newest token."""
    sampling, drawn = resolve(SamplingParams(seed=7), GenerationDefaults()), np.random.default_rng(7)
    wanted = [drawn.random() for _ in range(120)]
    sampler = Sampler(TokenSequence((1,), 200), sampling, (), SimpleNamespace(), range(10), None)
    for number in range(100):
        if number % 7 != 3:  # else its token is forced
            ahead = number % 3
            assert [sampler.next([2] * count).uniform for count in range(ahead + 1)] == wanted[number:][: ahead + 1]
        sampler.advance()
