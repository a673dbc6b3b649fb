"""Sampling of the next token: pure functions of logits (V,) float32.

A bias is added before the samplers of `CHAIN`, and a constraint's mask follows DRY.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.errors import EngineError, shown
from polarlm.engine.outputs import TokenLogprob
from polarlm.engine.params import FALLBACKS, OPTIONS, SamplingParams
from polarlm.engine.sampling.constraints import allowed_bits
from polarlm.model_loaders import elementary
from polarlm.model_loaders.config import GenerationDefaults
from polarlm.model_loaders.forks import cached_property

NEWEST = -1  # in `SamplerInput.recent`: the input token of the row that the draw is from
NOT_FINITE = "The model's output is not finite: its weights are damaged or not meant for this engine"


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingParams):
    """SamplingParams with every default filled in, and what the model's files ban."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    dry_multiplier: float
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str, ...]
    banned_first: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether recent tokens are not penalised."""
        return self.repeat_penalty == 1 and not self.presence_penalty and not self.frequency_penalty

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the best token is drawn: no sampler but XTC drops that one."""
        return self.top_k == 1 or (self.temperature == 0 and self.xtc_chance == 0)

    @cached_property
    def is_shaped(self) -> bool:
        """Whether a sampler of `SHAPES` is on."""
        return any(is_on(self) for is_on, _ in map(SAMPLERS.__getitem__, SHAPES))

    @property
    def xtc_chance(self) -> float:
        """How often XTC drops tokens; 0 where it is off."""
        return self.xtc_probability if self.xtc_threshold <= 0.5 else 0.0

    def xtc(self, uniform: float) -> tuple[float, bool]:
        """The random number of the draw, and whether XTC drops tokens: one number decides both. Within the numbers that
        say yes, and within the others, it is as random as it was."""
        chance = self.xtc_chance
        if uniform < chance:
            return uniform / chance, True
        return (uniform - chance) / (1 - chance), False


def resolve(params: SamplingParams, defaults: GenerationDefaults, vocab_size: int | None = None) -> Sampling:
    """`params` with every None filled in from the model's generation config, or else the engine's defaults. Raises
    EngineError on a token id of `vocab_size` or more."""
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        unknown_token = next((token for token in tokens if vocab_size is not None and token >= vocab_size), None)
        if unknown_token is not None:
            raise EngineError(f"{name} names token {shown(unknown_token)}, but the vocabulary has {vocab_size}")
    bans = {token: -math.inf for token in defaults.banned if vocab_size is None or token < vocab_size}
    model_values = {**defaults.sampling, "temperature": 0.0} if defaults.greedy else defaults.sampling
    values = {**vars(params), "logit_bias": {**params.logit_bias, **bans}}
    for name, fallback in FALLBACKS.items():
        if values[name] is None:
            values[name] = model_values.get(name, fallback)
    return Sampling(**values, banned_first=defaults.banned_first, banned_sequences=defaults.banned_sequences)


def most_tokens(params: SamplingParams, defaults: GenerationDefaults) -> int:
    """The most tokens of an answer: as the request says, else as the model's files do; -1 for no limit."""
    return defaults.max_tokens if params.max_tokens is None else params.max_tokens


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


_GREEDY = resolve(SamplingParams(temperature=0), GenerationDefaults())


def greedy(vocabulary: int) -> SamplerInput:
    """The inputs of drawing the most likely token."""
    return SamplerInput(_GREEDY, (), 0.0, vocabulary)


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
    logits = _adjust(raw, sampling, sampler_input.recent)
    if sampler_input.dry is not None:
        logits = logits.copy()
        logits[sampler_input.dry.ids] -= sampler_input.dry.amounts
    tokens = None  # the allowed ones: finding the best of these is ten times as fast as of all with the others at -inf
    if sampler_input.allowed is not None:
        tokens = np.flatnonzero(allowed_bits(sampler_input.allowed, sampler_input.vocabulary))
        logits = logits[tokens]
    if logits is not raw:
        best = int(logits.argmax()) if len(logits) else -1
        if best < 0 or logits[best] == -math.inf:
            raise nothing_left(sampler_input)
    if sampling.is_greedy:
        return best if tokens is None else int(tokens[best])
    candidates = Candidates(np.arange(len(logits)) if tokens is None else tokens, logits, np.empty(0))
    for is_on, drop in SAMPLERS.values():
        if is_on(sampling):
            candidates = drop(candidates, sampler_input)
    return int(candidates.ids[0])


def nothing_left(sampler_input: SamplerInput) -> EngineError:
    """The error of a draw in which every token is banned."""
    if sampler_input.allowed is None:
        return EngineError("logit_bias bans every token that could come next")
    more = ", together with logit_bias, min_tokens and the tokens that the model's files ban,"
    hint = more if sampler_input.sampling.logit_bias else ""
    return EngineError(f"The request's constraint{hint} bans every token that could come next")


def _adjust(logits: np.ndarray, params: Sampling, recent: Sequence[int]) -> np.ndarray:
    """The logits with bias and penalties; a copy if there are any."""
    if params.is_plain and not params.logit_bias:
        return logits
    logits = logits.copy()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if not params.is_plain and len(recent):
        ids, counts = np.unique(np.asarray(recent), return_counts=True)
        recent_logits = logits[ids]
        recent_logits = np.where(
            recent_logits > 0, recent_logits / params.repeat_penalty, recent_logits * params.repeat_penalty
        )
        logits[ids] = recent_logits - counts * params.frequency_penalty - params.presence_penalty
    return logits


class Candidates(NamedTuple):
    """Tokens that may be drawn, by id until top-k has sorted them: the largest logit first, equal ones by id."""

    ids: np.ndarray  # (n,)
    logits: np.ndarray  # (n,) float32; sorted ones float64
    probabilities: np.ndarray  # (n,) float64, of a token among all that top-k kept; none before

    def between(self, first: int, end: int) -> Candidates:
        return Candidates(self.ids[first:end], self.logits[first:end], self.probabilities[first:end])


def _top_n_sigma(candidates: Candidates, sampler_input: SamplerInput) -> Candidates:
    ids, logits, _ = candidates
    deviation = logits[logits > -math.inf].std(dtype=np.float64)
    least = float(logits.max()) - sampler_input.sampling.top_n_sigma * deviation
    kept = np.flatnonzero(logits.astype(np.float64) >= least)
    return candidates._replace(ids=ids[kept], logits=logits[kept])


def _top_k(candidates: Candidates, sampler_input: SamplerInput) -> Candidates:
    best = _best(candidates.logits, sampler_input.sampling.top_k)
    logits = candidates.logits[best].astype(np.float64)
    if sampler_input.sampling.xtc_chance:  # XTC may leave the last one alone
        logits = logits[logits > -math.inf]
    weights = elementary.exp(logits - logits[0])
    return Candidates(candidates.ids[best[: len(logits)]], logits, weights / weights.sum())


def _top_p(candidates: Candidates, sampler_input: SamplerInput) -> Candidates:
    sums = np.cumsum(candidates.probabilities)
    return candidates.between(0, int(np.searchsorted(sums, sampler_input.sampling.top_p)) + 1)


def _min_p(candidates: Candidates, sampler_input: SamplerInput) -> Candidates:
    least = sampler_input.sampling.min_p * candidates.probabilities[0]
    return candidates.between(0, int(np.count_nonzero(candidates.probabilities >= least)))


def _xtc(candidates: Candidates, sampler_input: SamplerInput) -> Candidates:
    """Drops those that reach the threshold, but for the last of them, if the random number says so."""
    sampling, probabilities = sampler_input.sampling, candidates.probabilities
    if not sampling.xtc(sampler_input.uniform)[1]:
        return candidates
    reached = int(np.count_nonzero(probabilities >= sampling.xtc_threshold * probabilities.sum()))
    return candidates.between(max(0, reached - 1), len(probabilities))


def _temperature(candidates: Candidates, sampler_input: SamplerInput) -> Candidates:
    """Draws one."""
    sampling, logits, drawn = sampler_input.sampling, candidates.logits, 0
    if sampling.temperature > 0:
        with np.errstate(over="ignore"):  # a temperature close to 0 makes all but the best tokens −inf
            sums = np.cumsum(elementary.exp((logits - logits[0]) / sampling.temperature))
        uniform, _ = sampling.xtc(sampler_input.uniform)
        drawn = int(np.searchsorted(sums, uniform * sums[-1], side="right").clip(max=len(sums) - 1))
    return candidates.between(drawn, drawn + 1)


Drop = Callable[[Candidates, SamplerInput], Candidates]

SAMPLERS: Mapping[str, tuple[Callable[[Sampling], bool], Drop]] = {  # when a sampler is on, and what it does
    "top_n_sigma": (lambda sampling: sampling.top_n_sigma > 0, _top_n_sigma),
    "top_k": (lambda _: True, _top_k),
    "top_p": (lambda sampling: sampling.top_p < 1, _top_p),
    "min_p": (lambda sampling: sampling.min_p > 0, _min_p),
    "xtc": (lambda sampling: sampling.xtc_chance > 0, _xtc),
    "temperature": (lambda _: True, _temperature),
}
CHAIN = ("penalties", "dry", *SAMPLERS)
"""The samplers in order, which is llama.cpp's, under llama-server's names."""

SHAPES = {name: [option for option in OPTIONS if option.startswith(name)] for name in SAMPLERS if name not in FALLBACKS}
"""The samplers that are off unless a request asks for them → their options, of which the first turns them on."""


def _best(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest logits (0: all), largest first, ties by id."""
    if not 0 < count < len(logits):
        return np.argsort(-logits, kind="stable")
    least = np.partition(logits, -count)[-count]
    larger = np.flatnonzero(logits > least)
    ids: np.ndarray = np.sort(np.concatenate([larger, np.flatnonzero(logits == least)[: count - len(larger)]]))
    return ids[np.argsort(-logits[ids], kind="stable")]


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
