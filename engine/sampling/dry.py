"""The DRY penalty, as llama.cpp has it: against tokens that would go on with a repetition.

Where the last tokens have stood before, the token that came next there gets less likely, the more so the longer the
repetition; a sequence breaker, such as a line end, begins it anew. So words and phrases may come back, and an answer
that goes round in circles finds its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from engine.sampling.repeats import Repeats
from engine.sampling.sample import Penalties, Sampling

ANSWER_ALONE = -2  # of `dry_penalty_last_n`
_MOST = 1e37  # to be subtracted: logits stay finite in float32


class Dry:
    """The penalties of one sequence, step by step.

    Reading a prompt costs a loop over it, each step a few vectorised passes over the tokens looked at: at 8,192 tokens
    of English 20 to 30 ms and 0.05 ms, at 65,536 tokens 0.3 s and 0.12 ms (2026-11-20, one of two busy cores).
    """

    def __init__(self, sampling: Sampling, text_of: Callable[[int], bytes], prompt: int = 0) -> None:
        """`text_of`: the bytes of a token. `prompt`: how many of the tokens are the prompt."""
        last_n = sampling.dry_penalty_last_n
        self._begin = prompt if last_n == ANSWER_ALONE else 0  # the first token that is looked at
        self._multiplier, self._base = sampling.dry_multiplier, sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._repeats = Repeats(None if last_n < 0 else max(last_n - 1, 0))
        self._breakers = [breaker.encode() for breaker in sampling.dry_sequence_breakers]
        self._text_of = cache(text_of)
        self._breaks: dict[int, bool] = {}  # whether there is a breaker in a token
        self._longest = max(map(len, self._breakers), default=1)
        self._end = b""  # of the text, a byte shorter than the longest breaker
        self._since = 0  # tokens behind the one that the last breaker ends in

    def read(self, ids: Sequence[int]) -> None:
        """Take note of what is new in `ids`, which must begin with those of the call before."""
        new = ids[self._begin + self._repeats.count :]
        self._repeats.extend(new)
        for token in new:
            self._look_for_breaker(token)

    def penalties(self, ids: Sequence[int]) -> Penalties | None:
        """The penalties on the token that follows `ids`, None where there are none.

        `ids` must begin with those of the call before.
        """
        self.read(ids)
        runs = self._repeats.runs
        inside = np.arange(len(runs), 0, -1, dtype=np.int32)  # tokens of a run that are among those looked at
        lengths = np.minimum(np.minimum(runs, inside), self._since)
        at = np.flatnonzero(lengths >= self._allowed)
        if len(at) == 0:
            return None
        tokens, which = np.unique(self._repeats.ids[self._repeats.count - 1 - at], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, which, lengths[at])
        kept = np.array([not self._is_breaker(token) for token in tokens.tolist()])
        return Penalties(tokens[kept], self._amounts(longest[kept] - self._allowed)) if kept.any() else None

    def _amounts(self, beyond: np.ndarray) -> np.ndarray:
        """The penalty of repetitions that are `beyond` (n,) tokens longer than allowed, (n,) float64."""
        with np.errstate(over="ignore"):
            return np.minimum(self._multiplier * float(self._base) ** beyond, _MOST)

    def _look_for_breaker(self, token: int) -> None:
        """Count the tokens since the last breaker, which may end in `token` and have begun in earlier ones."""
        before, text = len(self._end), self._end + self._text_of(token)
        found = any(text.find(breaker, max(before + 1 - len(breaker), 0)) >= 0 for breaker in self._breakers)
        self._since = 0 if found else self._since + 1
        self._end = text[max(len(text) + 1 - self._longest, 0) :]

    def _is_breaker(self, token: int) -> bool:
        known = self._breaks.get(token)
        if known is None:
            text = self._text_of(token)
            known = self._breaks[token] = any(breaker in text for breaker in self._breakers)
        return known
