"""Choosing the next token: pure functions of logits (V,) float32.

The order is llama.cpp's: bias, penalties, top-k, top-p, min-p, temperature, draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config import SamplingParams
from engine.errors import EngineError
from model_loaders.config import GenerationDefaults

PENALTY_WINDOW = 64  # last tokens, prompt included, that the penalties look at

_USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}


@dataclass(frozen=True)
class Sampling:
    """How to draw, with every default filled in."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]


def resolve(params: SamplingParams, defaults: GenerationDefaults) -> Sampling:
    """`params` with every None filled in: from the model's generation config, else the usual values.

    Raises EngineError on a value that makes no sense.
    """
    _check(params)
    chosen: dict[str, Any] = {}
    for name, usual in _USUAL.items():
        given, of_model = getattr(params, name), getattr(defaults, name)
        if name == "temperature" and defaults.greedy:
            of_model = 0.0
        chosen[name] = next(value for value in (given, of_model, usual) if value is not None)
    return Sampling(
        **chosen,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
    )


_LIMITS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 1e4, "a number from 0 (greedy) up"),
    "top_p": (1e-9, 1, "above 0 and at most 1"),
    "min_p": (0, 1, "from 0 to 1"),
    "repeat_penalty": (1e-3, 1e3, "a positive number; 1 is off"),
    "presence_penalty": (-1e3, 1e3, "a number"),
    "frequency_penalty": (-1e3, 1e3, "a number"),
    "top_k": (0, 2**31, "a whole number; 0 keeps all"),
    "max_tokens": (-1, 2**31, "a whole number; -1 is no limit"),
}


def _check(params: SamplingParams) -> None:
    """Raises EngineError naming the first field with a wrong type or value."""

    def refuse(name: str, wanted: str) -> None:
        raise EngineError(f"{name} is {getattr(params, name)!r}, but must be {wanted}")

    for name, (low, high, wanted) in _LIMITS.items():
        value = getattr(params, name)
        if value is None:
            continue
        kinds = (int,) if name in ("top_k", "max_tokens") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:  # NaN is in no range
            refuse(name, wanted)
    if any(not isinstance(stop, str) or not stop for stop in params.stop):
        refuse("stop", "a tuple of non-empty strings")
    if any(math.isnan(bias) for bias in params.logit_bias.values()):
        refuse("logit_bias", "a number for each token id")


def sample(logits: np.ndarray, params: Sampling, recent: Sequence[int], rng: np.random.Generator) -> int:
    """Draw a token id. `recent` are the ids so far (the last PENALTY_WINDOW count).

    Cost: one pass over V, plus a sort of the top-k.
    """
    logits = _adjust(logits, params, recent)
    if params.temperature == 0 or params.top_k == 1:
        return int(np.argmax(logits))
    ids = _best(logits, params.top_k)
    kept = logits[ids].astype(np.float64)
    probabilities = np.exp(kept - kept[0])
    probabilities /= probabilities.sum()
    count = len(ids)
    if params.top_p < 1:
        count = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
    count = min(count, int(np.count_nonzero(probabilities >= params.min_p * probabilities[0])))
    scaled = (kept[:count] - kept[0]) / params.temperature
    weights = np.cumsum(np.exp(scaled))
    return int(ids[np.searchsorted(weights, rng.random() * weights[-1], side="right").clip(max=count - 1)])


def _adjust(logits: np.ndarray, params: Sampling, recent: Sequence[int]) -> np.ndarray:
    """Bias and penalties, on a copy where there are any."""
    plain = params.repeat_penalty == 1 and not params.presence_penalty and not params.frequency_penalty
    if plain and not params.logit_bias:
        return logits
    logits = logits.copy()
    for token, bias in params.logit_bias.items():
        if not 0 <= token < len(logits):
            raise EngineError(f"logit_bias names token {token}, but the vocabulary has {len(logits)}")
        logits[token] += bias
    if not plain and len(recent):
        ids, counts = np.unique(np.asarray(recent[-PENALTY_WINDOW:]), return_counts=True)
        seen = logits[ids]
        seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
        logits[ids] = seen - counts * params.frequency_penalty - params.presence_penalty
    return logits


def _best(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest logits (all for 0), largest first; equal ones by id."""
    ids = np.arange(len(logits))
    if 0 < count < len(logits):
        ids = np.sort(np.argpartition(-logits, count - 1)[:count])
    return ids[np.argsort(-logits[ids], kind="stable")]
