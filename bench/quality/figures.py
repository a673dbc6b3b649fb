"""What is said of many divergences at once, and how far chance may have moved it.

Standard errors are bootstrapped over windows of a text: positions of one window depend on one another, so windows, not
positions, are drawn again, with replacement (Efron 1979). What is said of each draw varies by the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.bench.quality.divergence import Divergence

_DRAWS = 200  # their spread is within 5 % of the spread of infinitely many
_TAIL = 1000  # positions without which nothing is said of one in a thousand


@dataclass(frozen=True)
class Figures:
    """Figures of many divergences; KL in nats.

    errors: the standard errors of the others by name; None if there is a single window.
    """

    kl_mean: float
    kl_median: float
    kl_90th_percentile: float
    kl_99th_percentile: float
    kl_999th_percentile: float | None  # None below 1,000 positions
    kl_max: float
    same_top1: float  # share of positions
    draft_acceptance: float  # share of full precision's own tokens that a model with these distributions accepts
    errors: dict[str, float] | None


def figures(windows: Sequence[Divergence]) -> Figures:
    """The figures of windows' divergences, with their errors."""
    values = _of(windows)
    draws = [_of([windows[i] for i in chosen]) for chosen in drawn(len(windows))]
    errors = {name: float(np.std([draw[name] for draw in draws])) for name in values} if draws else None
    whole = sum(len(one.kl) for one in windows)
    tail = values["kl_999th_percentile"] if whole >= _TAIL else None
    if errors is not None and tail is None:
        del errors["kl_999th_percentile"]
    return Figures(**values | {"kl_999th_percentile": tail}, errors=errors)  # type: ignore[arg-type]


def error_of(statistic: Callable[[np.ndarray], float], windows: int) -> float | None:
    """The standard error of a statistic of chosen windows, which gets their indices; None for a single window."""
    draws = [statistic(chosen) for chosen in drawn(windows)]
    return float(np.std(draws)) if draws else None


def drawn(windows: int) -> Iterator[np.ndarray]:
    """Yield indices (windows,) of windows drawn with replacement, the same at each call; nothing for a single one."""
    rng = np.random.default_rng(0)
    for _ in range(_DRAWS if windows > 1 else 0):
        yield rng.integers(windows, size=windows)


def _of(windows: Sequence[Divergence]) -> dict[str, float]:
    kl = np.concatenate([one.kl for one in windows])
    median, ninety, ninety_nine, tail, most = np.quantile(kl, (0.5, 0.9, 0.99, 0.999, 1)).tolist()
    return {
        "kl_mean": float(kl.mean()),
        "kl_median": median,
        "kl_90th_percentile": ninety,
        "kl_99th_percentile": ninety_nine,
        "kl_999th_percentile": tail,
        "kl_max": most,
        "same_top1": float(np.concatenate([one.same_top1 for one in windows]).mean()),
        "draft_acceptance": float(np.concatenate([one.accepted for one in windows]).mean()),
    }
