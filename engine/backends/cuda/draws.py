"""How the next tokens are drawn, as words for `cuda/sampling/sample.cu`; see `engine.sampling.sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.backends.cuda.cache import Told
from engine.limits import PENALTY_WINDOW
from engine.sampling.sample import Draw

_PARAMS = 8  # float32 words of a row, before the recent ids


@dataclass
class Draws(Told):
    """How the tokens of B rows are drawn.

    table: int32 (B, 8 + 64) on the host: the bits of float32 temperature, top_k, top_p, min_p, repeat_penalty,
    presence_penalty, frequency_penalty and uniform in [0, 1); then the ids of the last tokens, −1 for none.
    vocabulary: ids that there are, the same in all rows.
    """

    vocabulary: int


def pack_draws(draws: Sequence[Draw]) -> Draws:
    """What the kernel needs to know of `draws`, all but their biases and what DRY subtracts."""
    (vocabulary,) = {draw.vocabulary for draw in draws}
    table = np.full((len(draws), _PARAMS + PENALTY_WINDOW), -1, np.int32)
    for row, draw in zip(table, draws, strict=True):
        row[:_PARAMS] = np.array(_params(draw), np.float32).view(np.int32)
        row[_PARAMS : _PARAMS + len(draw.recent)] = draw.recent
    return Draws(table, vocabulary)


def _params(draw: Draw) -> tuple[float, ...]:
    of = draw.sampling
    below_one = min(np.float32(draw.uniform), np.nextafter(np.float32(1), np.float32(0)))
    penalties = (of.repeat_penalty, of.presence_penalty, of.frequency_penalty)
    return of.temperature, float(min(of.top_k, draw.vocabulary)), of.top_p, of.min_p, *penalties, float(below_one)
