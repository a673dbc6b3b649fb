"""Sampler inputs of a request's next tokens: its sampling parameters, random numbers, DRY and constraint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from polarlm.engine.requests.scheduler import TokenSequence
from polarlm.engine.sampling.constraints import Constraint, checked_mask, only_token
from polarlm.engine.sampling.dry import Dry
from polarlm.engine.sampling.sample import SamplerInput, Sampling, greedy
from polarlm.model_loaders.forks import cached_property
from polarlm.model_loaders.tokenizers import Tokenizer

_AT_ONCE = 32  # random numbers, which are as if they were drawn one by one


class Sampler:
    """Makes the sampler inputs of one sequence. Each token uses one random number, whether it needs one or not."""

    def __init__(
        self,
        sequence: TokenSequence,
        sampling: Sampling,
        ends: Collection[int],
        tokenizer: Tokenizer,
        vocabulary: range,
        constraint: Constraint | None,
    ) -> None:
        """ends: tokens that end the answer."""
        self._sequence, self._sampling = sequence, sampling
        self._vocabulary, self._constraint = vocabulary.stop, constraint
        bans = {token: -math.inf for token in ends if token in vocabulary}
        self._sampling_without_ends = replace(sampling, logit_bias={**sampling.logit_bias, **bans})
        self._is_constant = not (sampling.min_tokens or sampling.banned_first or sampling.banned_sequences)
        self._window = 0 if sampling.is_plain else sampling.repeat_last_n  # penalised tokens
        self._numbers: deque[float] = deque()  # random numbers drawn in advance, for the next tokens in order
        self._mask: np.ndarray | None = None  # the next token's, if `_has_mask`; None if all tokens are allowed
        self._has_mask = constraint is None
        self._dry: Dry | None = None
        if sampling.dry_multiplier > 0 and sampling.dry_penalty_last_n != 0:

            def text_of(token: int) -> bytes:
                return tokenizer.token_bytes(token) or tokenizer.token_name(token).encode()

            self._dry = Dry(sampling, text_of, len(sequence.prompt), sequence.text_from)
            self._dry.read(sequence.ids)  # here, outside the engine's lock
        self.none = greedy(self._vocabulary)
        """The sampler input of a row whose next token is known: the result only says if the row's logits are finite."""
        self.reach_ahead = constraint is None and self._dry is None and not sampling.banned_sequences
        """Whether tokens can be sampled after others that are not in `sequence` yet: not with a constraint, DRY or
        sequences that the model must not write."""

    @cached_property
    def _rng(self) -> np.random.Generator:
        """Made for the first token: requests for vectors have none, and entropy of the system takes a while."""
        return np.random.default_rng(None if self._sampling.seed < 0 else self._sampling.seed)

    def next(self, after: Sequence[int] = ()) -> SamplerInput:
        """Return the sampler input of the next token. Raises whatever the constraint raises. after: tokens before it
        that are not in the sequence yet: drafted ones, or NEWEST for one that is not known."""
        count = len(after)
        recent: Sequence[int] = ()
        if window := self._window:
            recent = self._sequence.ids[max(self._sequence.text_from, len(self._sequence.ids) + count - window) :]
            recent += after[max(0, count - window) :]
        dry = None if self._dry is None else self._dry.penalties(self._sequence.ids)
        while len(self._numbers) <= count:
            self._numbers += self._rng.random(_AT_ONCE).tolist()
        sampling = self._sampling if self._is_constant else self._sampling_after(after)
        allowed = self._mask if self._has_mask else self._allowed_tokens()
        numbers, logprobs = self._numbers, self._sampling.logprobs
        return SamplerInput(sampling, recent, numbers[count], self._vocabulary, logprobs, dry, allowed)

    def only_token(self) -> int | None:
        """Return the next token if the constraint allows only one; None if it must be sampled or none is allowed."""
        if self._constraint is None or self._sampling.logprobs is not None:
            return None
        mask = self._allowed_tokens()
        token = None if mask is None else only_token(mask, self._vocabulary)
        return None if token is None or self._sampling_after().logit_bias.get(token) == -math.inf else token

    def advance(self) -> None:
        """Advance by one token, which was appended to the sequence, sampled or not."""
        if self._numbers:
            self._numbers.popleft()
        else:
            self._rng.random()
        self._has_mask = self._constraint is None

    def _sampling_after(self, after: Sequence[int] = ()) -> Sampling:
        generated = self._sequence.generated + len(after)
        sampling = self._sampling if generated >= self._sampling.min_tokens else self._sampling_without_ends
        bans = sampling.banned_first if generated == 0 else ()
        if sampling.banned_sequences:
            ids = [*self._sequence.ids[-max(map(len, sampling.banned_sequences)) :], *after]
            bans += tuple(last for *first, last in sampling.banned_sequences if ids[-len(first) :] == first)
        biases = {token: -math.inf for token in bans if token < self._vocabulary}
        return replace(sampling, logit_bias={**sampling.logit_bias, **biases}) if biases else sampling

    def _allowed_tokens(self) -> np.ndarray | None:
        """Return the constraint's mask (ceil(V / 32),) uint32; None if all tokens are allowed."""
        if not self._has_mask and self._constraint is not None:
            mask = self._constraint.allowed()
            self._mask, self._has_mask = None if mask is None else checked_mask(mask, self._vocabulary), True
        return self._mask
