"""The divergence of next-token distributions from a reference's, computed from logits in float64, and what is said of
many at once, with how far chance may have moved it.

Standard errors are bootstrapped over windows of a text: positions of one window depend on one another, so windows, not
positions, are drawn again, with replacement (Efron 1979). What is said of each draw varies by the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polarlm.bench.result import Result

_NAMES = ("kl", "same_top1", "accepted")
# Rows that are converted to float64 at a time: with 50,000 columns, 25 MB per copy.
_SLAB = 64


@dataclass(frozen=True)
class Divergence:
    """The divergence at each of T positions."""

    kl: np.ndarray  # (T,) float64, nats: Σ p·ln(p/q), where p is the reference's distribution
    same_top1: np.ndarray  # (T,) bool: whether both have the same most likely token
    accepted: np.ndarray
    """(T,) float64: Σ min(p, q), the probability that a token drawn from the reference's distribution is accepted as a
    draft for the other one (Leviathan et al. 2023, corollary 3.6)."""

    def __getitem__(self, rows: slice) -> Divergence:
        return Divergence(self.kl[rows], self.same_top1[rows], self.accepted[rows])


def compare(reference: np.ndarray, logits: np.ndarray) -> Divergence:
    """The divergence of `logits` (T, V) float32 from `reference` (T, V) float32, both finite."""
    kl, accepted = np.empty((2, len(reference)))
    for first in range(0, len(reference), _SLAB):
        rows = slice(first, first + _SLAB)
        (log_p, p), (log_q, q) = softmax(reference[rows]), softmax(logits[rows])
        accepted[rows] = np.minimum(p, q, out=q).sum(axis=-1)
        log_q -= log_p
        kl[rows] = -(p * log_q).sum(axis=-1)
    # Rounding may make a sum of terms close to 0 slightly negative.
    return Divergence(np.maximum(kl, 0), reference.argmax(axis=-1) == logits.argmax(axis=-1), accepted)


def softmax(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and probabilities (T, V) float64 of logits (T, V), with one exponential of each."""
    logs = logits.astype(np.float64)
    logs -= logs.max(axis=-1, keepdims=True)
    powers = np.exp(logs)
    total = powers.sum(axis=-1, keepdims=True)
    logs -= np.log(total)
    powers /= total
    return logs, powers


def joined(parts: Sequence[Divergence]) -> Divergence:
    """The divergence at the positions of all parts, one after another."""
    return Divergence(*(np.concatenate([getattr(one, name) for one in parts]) for name in _NAMES))


def perplexity(logprobs: np.ndarray) -> float:
    """exp(−mean) of logprobs (T,), summed in float64."""
    return float(np.exp(-np.mean(logprobs, dtype=np.float64)))


_DRAWS = 200  # their spread is within 5 % of the spread of infinitely many
_TAIL = 1000  # positions without which nothing is said of one in a thousand
TAIL = "kl_999th_percentile"


def add_figures(result: Result, subject: str, contestant: str, windows: Sequence[Divergence], **more: Any) -> None:
    """Add a row for each figure of windows' divergences, KL in nats, with the mean of each window as its runs:

    mean, median, quantiles and maximum of KL; "same_top1", the share of positions with the same most likely token; and
    "draft_acceptance", the share of full precision's own tokens that a model with these distributions accepts. TAIL is
    left out below 1,000 positions.
    """
    values = _figures(windows)
    draws = [_figures([windows[i] for i in chosen]) for chosen in resamples(len(windows))]
    if sum(len(one.kl) for one in windows) < _TAIL:
        del values[TAIL]
    runs = {"kl_mean": [float(one.kl.mean()) for one in windows]}
    for name, value in values.items():
        error = float(np.std([draw[name] for draw in draws])) if draws else None
        result.add(subject, contestant, name, runs.get(name, ()), value=value, error=error, **more)


def error_of(statistic: Callable[[np.ndarray], float], windows: int) -> float | None:
    """The standard error of a statistic of chosen windows, which gets their indices; None for a single window."""
    draws = [statistic(chosen) for chosen in resamples(windows)]
    return float(np.std(draws)) if draws else None


def resamples(windows: int) -> Iterator[np.ndarray]:
    """Yield indices (windows,) of windows drawn with replacement, the same at each call; nothing for a single one."""
    rng = np.random.default_rng(0)
    for _ in range(_DRAWS if windows > 1 else 0):
        yield rng.integers(windows, size=windows)


def _figures(windows: Sequence[Divergence]) -> dict[str, float]:
    kl = np.concatenate([one.kl for one in windows])
    median, ninety, ninety_nine, tail, most = np.quantile(kl, (0.5, 0.9, 0.99, 0.999, 1)).tolist()
    return {
        "kl_mean": float(kl.mean()),
        "kl_median": median,
        "kl_90th_percentile": ninety,
        "kl_99th_percentile": ninety_nine,
        TAIL: tail,
        "kl_max": most,
        "same_top1": float(np.concatenate([one.same_top1 for one in windows]).mean()),
        "draft_acceptance": float(np.concatenate([one.accepted for one in windows]).mean()),
    }
