"""Sampling of the next token: pure functions of logits (V,) float32.

A bias is added before the samplers of `CHAIN`, and a constraint's mask follows DRY.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.errors import EngineError, shown
from polarlm.engine.outputs import TokenLogprob
from polarlm.engine.params import OPTIONS, SamplingParams
from polarlm.engine.sampling.constraints import allowed_bits
from polarlm.model_loaders import elementary
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.forks import cached_property

NEWEST = -1  # in `SamplerInput.recent`: the input token of the row that the draw is from
NOT_FINITE = "The model's output is not finite: its weights are damaged or not meant for this engine"

CHAIN = ("penalties", "dry", "top_n_sigma", "top_k", "top_p", "min_p", "xtc", "temperature")
"""The samplers in order, which is llama.cpp's, under llama-server's names."""


@dataclass(frozen=True)
class Sampling(SamplingParams):
    """SamplingParams with every default filled in, a probability of 0 if XTC is off, and what the model's files ban."""

    # The values where neither the request nor the model's files name one.
    max_tokens: int = -1  # no limit
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    banned_first: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether recent tokens are not penalised."""
        return self.repeat_penalty == 1 and not self.presence_penalty and not self.frequency_penalty

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the best token is drawn: no sampler but XTC drops that one."""
        return self.top_k == 1 or (self.temperature == 0 and self.xtc_probability == 0)

    @cached_property
    def is_shaped(self) -> bool:
        """Whether a sampler of `SHAPES` is on."""
        return any(getattr(self, option) > 0 for option, *_ in SHAPES.values())

    def xtc(self, uniform: float) -> tuple[float, bool]:
        """The random number of the draw, and whether XTC drops tokens: one number decides both. Within the numbers that
        say yes, and within the others, it is as random as it was."""
        chance = self.xtc_probability
        if uniform < chance:
            return uniform / chance, True
        return (uniform - chance) / (1 - chance), False


FALLBACKS = {name: getattr(Sampling, name) for name in OPTIONS if name in vars(Sampling)}
SHAPES = {name: [row for row in OPTIONS if row.startswith(name)] for name in CHAIN[2:] if name not in FALLBACKS}
"""Samplers that are off unless a request asks for them → their options. One is on if its first option is above 0."""


def resolve(params: SamplingParams, defaults: GenerationDefaults, vocab_size: int | None = None) -> Sampling:
    """`params` with every None filled in from the model's generation config, or else the engine's defaults. Raises
    EngineError on a token id of `vocab_size` or more."""
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        unknown_token = next((token for token in tokens if vocab_size is not None and token >= vocab_size), None)
        if unknown_token is not None:
            raise EngineError(f"{name} names token {shown(unknown_token)}, but the vocabulary has {vocab_size}")
    bans = {token: -math.inf for token in defaults.banned if vocab_size is None or token < vocab_size}
    values: dict[str, Any] = {"max_tokens": defaults.max_tokens, **defaults.sampling}
    values |= {"temperature": 0.0} if defaults.greedy else {}
    values |= {name: value for name, value in vars(params).items() if value is not None}
    values["logit_bias"] = {**params.logit_bias, **bans}
    if params.xtc_threshold > 0.5:  # XTC is off
        values["xtc_probability"] = 0.0
    return Sampling(**values, banned_first=defaults.banned_first, banned_sequences=defaults.banned_sequences)


class Penalties(NamedTuple):
    """Amounts that are subtracted from the logits of some tokens."""

    ids: np.ndarray  # (n,) int32, distinct
    amounts: np.ndarray  # (n,) float64, 0 or more


@dataclass(frozen=True)
class SamplerInput:
    """The inputs of drawing one token, apart from the logits.

    A token whose bit in `allowed` is 0 is never chosen, whatever its bias. Log-probabilities are always taken from the
    model's own distribution, as in llama.cpp: a mask or a ban does not change them, so they can be compared between
    requests with and without a constraint.
    """

    sampling: Sampling
    recent: Sequence[int]  # the last ids, oldest first, if they are penalised; NEWEST for one that is not known yet
    uniform: float  # random, from [0, 1)
    vocabulary: int  # the number of ids; logits may have more
    logprobs: int | None = None  # number of most likely tokens to report log-probabilities of, besides the drawn one
    dry: Penalties | None = None  # on tokens that would continue a repetition
    allowed: np.ndarray | None = None  # (ceil(vocabulary / 32),) uint32: bit v % 32 of word v // 32 allows token v


@cache
def greedy(vocabulary: int) -> SamplerInput:
    """The inputs of drawing the most likely token."""
    return SamplerInput(Sampling(temperature=0), (), 0.0, vocabulary)


Sampled = int | TokenLogprob | EngineError  # with log-probabilities if requested; the error if none can be chosen


class Fetch(NamedTuple):
    """Tokens that are being copied to the host. ids: the tokens on the device, which the next step can take as its
    inputs; None if the device has none. logits: of a step without samplers, from which no token is drawn yet."""

    ids: Any
    wait: Callable[[], list[Sampled]]
    logits: Any = None


def sample_all(
    logits: np.ndarray, sampler_inputs: Sequence[SamplerInput], best: Sequence[int] | None = None
) -> list[Sampled]:
    """What `sample` returns for each row of logits (B, V), with log-probabilities if requested, or the error it
    raises."""

    def one(row: np.ndarray, sampler_input: SamplerInput, best: int | None) -> Sampled:
        try:
            token = sample(row, sampler_input, best)
        except EngineError as error:
            return error
        if sampler_input.logprobs is None:
            return token
        return token_logprob(row[: sampler_input.vocabulary], token, sampler_input.logprobs)

    best_tokens: Sequence[int | None] = [None] * len(sampler_inputs) if best is None else best
    return [one(*row) for row in zip(logits, sampler_inputs, best_tokens, strict=True)]


def sample(logits: np.ndarray, sampler_input: SamplerInput, best: int | None = None) -> int:
    """Draw a token id from logits (V,). A token whose logit is −infinity is never drawn. Raises EngineError if no token
    can be chosen. Cost: one pass over V, plus a sort of the top-k.

    best: the id of the largest logit, if it is known, or a negative number if some logits are not finite.
    """
    sampling, raw = sampler_input.sampling, logits[: sampler_input.vocabulary]
    if best is None:
        best = int(raw.argmax())
        if not math.isfinite(raw[best]):  # argmax returns the index of a NaN, if there is one
            best = -1
    if best < 0:
        raise EngineError(NOT_FINITE, "model_damaged")
    logits = _adjust(raw, sampler_input)
    tokens = None  # the allowed ones: finding the best of these is ten times as fast as of all with the others at -inf
    if sampler_input.allowed is not None:
        tokens = np.flatnonzero(allowed_bits(sampler_input.allowed, sampler_input.vocabulary))
        logits = logits[tokens]
    if logits is not raw:
        best = int(logits.argmax()) if len(logits) else -1
        if best < 0 or logits[best] == -math.inf:
            raise nothing_left(sampler_input)
    if not sampling.is_greedy:
        candidates = Candidates(logits)
        for name in CHAIN[2:]:
            candidates = getattr(candidates, name)(sampling, sampler_input.uniform)
        best = int(candidates.places[0])
    return best if tokens is None else int(tokens[best])


def _adjust(logits: np.ndarray, sampler_input: SamplerInput) -> np.ndarray:
    """The logits with bias, penalties and DRY; a copy if there are any."""
    sampling, recent, dry = sampler_input.sampling, sampler_input.recent, sampler_input.dry
    if sampling.is_plain and not sampling.logit_bias and dry is None:
        return logits
    logits = logits.copy()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if not sampling.is_plain and len(recent):
        ids, counts = np.unique(np.asarray(recent), return_counts=True)
        changed, penalty = logits[ids], sampling.repeat_penalty
        changed = np.where(changed > 0, changed / penalty, changed * penalty)
        logits[ids] = changed - counts * sampling.frequency_penalty - sampling.presence_penalty
    if dry is not None:
        logits[dry.ids] -= dry.amounts
    return logits


class Candidates(NamedTuple):
    """Tokens that may be drawn, by id until top-k sorts them: the largest logit first, equal ones by id.

    A method for each sampler of `CHAIN` after DRY returns those that it keeps; `temperature` keeps one.
    """

    logits: np.ndarray  # (n,) float32; sorted ones float64
    places: np.ndarray = np.empty(0, np.int64)  # (n,) where they were in the row; none if these are all of it
    probabilities: np.ndarray = np.empty(0)  # (n,) of sorted ones, float64: among all that top-k keeps

    def keep(self, first: int, end: int) -> Candidates:
        return Candidates(self.logits[first:end], self.places[first:end], self.probabilities[first:end])

    def top_n_sigma(self, sampling: Sampling, _: float) -> Candidates:
        if sampling.top_n_sigma <= 0:
            return self
        deviation = self.logits[self.logits > -math.inf].std(dtype=np.float64)
        least = float(self.logits.max()) - sampling.top_n_sigma * deviation
        kept = np.flatnonzero(self.logits.astype(np.float64) >= least)
        return Candidates(self.logits[kept], kept)

    def top_k(self, sampling: Sampling, _: float) -> Candidates:
        best = _best(self.logits, sampling.top_k)
        logits = self.logits[best].astype(np.float64)
        if sampling.xtc_probability > 0:  # XTC may leave the last one alone
            logits = logits[logits > -math.inf]
        weights = elementary.exp(logits - logits[0])
        places = self.places[best] if len(self.places) else best
        return Candidates(logits, places[: len(logits)], weights / weights.sum())

    def top_p(self, sampling: Sampling, _: float) -> Candidates:
        if sampling.top_p == 1:
            return self
        return self.keep(0, int(np.searchsorted(np.cumsum(self.probabilities), sampling.top_p)) + 1)

    def min_p(self, sampling: Sampling, _: float) -> Candidates:
        least = sampling.min_p * self.probabilities[0]
        return self.keep(0, int(np.count_nonzero(self.probabilities >= least)))

    def xtc(self, sampling: Sampling, uniform: float) -> Candidates:
        """Drops those that reach the threshold, but for the last of them, if the random number says so."""
        if not sampling.xtc(uniform)[1]:
            return self
        least = sampling.xtc_threshold * self.probabilities.sum()
        return self.keep(max(0, int(np.count_nonzero(self.probabilities >= least)) - 1), len(self.logits))

    def temperature(self, sampling: Sampling, uniform: float) -> Candidates:
        drawn = 0
        if sampling.temperature > 0:
            with np.errstate(over="ignore"):  # a temperature close to 0 makes all but the best tokens −inf
                sums = np.cumsum(elementary.exp((self.logits - self.logits[0]) / sampling.temperature))
            target = sampling.xtc(uniform)[0] * sums[-1]
            drawn = int(np.searchsorted(sums, target, side="right").clip(max=len(sums) - 1))
        return self.keep(drawn, drawn + 1)


def _best(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest logits (0: all), largest first, ties by id."""
    if not 0 < count < len(logits):
        return np.argsort(-logits, kind="stable")
    least = np.partition(logits, -count)[-count]
    larger = np.flatnonzero(logits > least)
    ids: np.ndarray = np.sort(np.concatenate([larger, np.flatnonzero(logits == least)[: count - len(larger)]]))
    return ids[np.argsort(-logits[ids], kind="stable")]


def nothing_left(sampler_input: SamplerInput) -> EngineError:
    """The error of a draw in which every token is banned."""
    if sampler_input.allowed is None:
        return EngineError("logit_bias bans every token that could come next")
    more = ", together with logit_bias, min_tokens and the tokens that the model's files ban,"
    hint = more if sampler_input.sampling.logit_bias else ""
    return EngineError(f"The request's constraint{hint} bans every token that could come next")


# -- log-probabilities -------------------------------------------------------------------------------------------


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities (…, V) float64 of logits (…, V) of any magnitude."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    values -= elementary.log(elementary.exp(values).sum(axis=-1, keepdims=True))
    return values


def token_logprob(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Log-probabilities from the model's logits (V,), of `token` and of the `count` most likely ids.

    V is the vocabulary, without the head's rows that are not tokens. Ids of probability 0 are left out. Cost: one pass
    over V in float64, and a partial sort if count > 0.
    """
    ids = _best(logits, count) if count else np.arange(0)
    ids = ids[np.isfinite(logits[ids])]
    logprobs = log_softmax(logits)
    top = zip(ids.tolist(), logprobs[ids].tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(top))
