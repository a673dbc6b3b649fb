"""The DRY penalty on tokens that would continue a repetition, as in llama.cpp.

If the last tokens occurred earlier, the token that followed them there is penalised, more strongly the longer the
repetition is. A repetition does not extend beyond a sequence breaker, such as a line end. So words and phrases may be
repeated, and an answer that repeats itself endlessly is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from polarlm.engine.sampling.repeats import Repeats
from polarlm.engine.sampling.sample import Penalties, Sampling

ANSWER_ALONE = -2  # value of `dry_penalty_last_n`
_MOST = 1e37  # the largest penalty: logits stay finite in float32


class Dry:
    """The penalties of one sequence, step by step: a loop over a prompt's tokens, a few vectorised passes over the
    tokens in range for a step (0.3 s and 0.12 ms at 65,536 tokens of English; 2026-11-20, one of two busy cores)."""

    def __init__(
        self, sampling: Sampling, text_of: Callable[[int], bytes], prompt: int = 0, text_from: int = 0
    ) -> None:
        """text_of: the bytes of a token. prompt: the number of its tokens. text_from: the first token that counts."""
        last_n = sampling.dry_penalty_last_n
        self._begin = prompt if last_n == ANSWER_ALONE else text_from  # the first token in range
        self._multiplier, self._base = sampling.dry_multiplier, sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._repeats = Repeats(None if last_n < 0 else max(last_n - 1, 0))
        self._breakers = [breaker.encode() for breaker in sampling.dry_sequence_breakers]
        self._text_of = text_of = cache(text_of)
        self._is_breaker = cache(lambda token: any(breaker in text_of(token) for breaker in self._breakers))
        self._longest = max(map(len, self._breakers), default=1)
        self._end = b""  # the end of the text, a byte shorter than the longest breaker
        self._tokens_since_breaker = 0  # tokens since the one in which the last breaker ends

    def read(self, ids: Sequence[int]) -> None:
        """Read the new tokens of `ids`, which must begin with the ids of the previous call."""
        new = ids[self._begin + self._repeats.count :]
        self._repeats.extend(new)
        for token in new:
            self._look_for_breaker(token)

    def penalties(self, ids: Sequence[int]) -> Penalties | None:
        """The penalties on the token after `ids`, which must begin with the ids of the previous call; None if there are
        none."""
        self.read(ids)
        runs = self._repeats.runs
        inside = np.arange(len(runs), 0, -1, dtype=np.int32)  # the most tokens of a run that are in range
        lengths = np.minimum(np.minimum(runs, inside), self._tokens_since_breaker)
        at = np.flatnonzero(lengths >= self._allowed)
        if len(at) == 0:
            return None
        tokens, which = np.unique(self._repeats.ids[self._repeats.count - 1 - at], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, which, lengths[at])
        is_kept = np.array([not self._is_breaker(token) for token in tokens.tolist()])
        with np.errstate(over="ignore"):
            amounts = np.minimum(self._multiplier * float(self._base) ** (longest[is_kept] - self._allowed), _MOST)
        return Penalties(tokens[is_kept], amounts) if is_kept.any() else None

    def _look_for_breaker(self, token: int) -> None:
        """Count the tokens since the last breaker, which may begin in earlier tokens and end in `token`."""
        length, text = len(self._end), self._end + self._text_of(token)
        is_broken = any(text.find(breaker, max(length + 1 - len(breaker), 0)) >= 0 for breaker in self._breakers)
        self._tokens_since_breaker = 0 if is_broken else self._tokens_since_breaker + 1
        self._end = text[max(len(text) + 1 - self._longest, 0) :]
