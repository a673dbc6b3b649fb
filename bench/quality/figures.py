"""What is said of many divergences at once, and how far chance may have moved it.

Standard errors are bootstrapped over windows of a text: positions of one window depend on one another, so windows, not
positions, are drawn again, with replacement (Efron 1979). What is said of each draw varies by the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from polarlm.bench.quality.divergence import Divergence
from polarlm.bench.result import Result

_DRAWS = 200  # their spread is within 5 % of the spread of infinitely many
_TAIL = 1000  # positions without which nothing is said of one in a thousand
TAIL = "kl_999th_percentile"


def add_figures(result: Result, subject: str, contestant: str, windows: Sequence[Divergence], **more: Any) -> None:
    """Add a row for each figure of windows' divergences, KL in nats, with the mean of each window as its runs:

    mean, median, quantiles and maximum of KL; "same_top1", the share of positions with the same most likely token; and
    "draft_acceptance", the share of full precision's own tokens that a model with these distributions accepts. TAIL is
    left out below 1,000 positions.
    """
    values = _of(windows)
    draws = [_of([windows[i] for i in chosen]) for chosen in drawn(len(windows))]
    if sum(len(one.kl) for one in windows) < _TAIL:
        del values[TAIL]
    runs = {"kl_mean": [float(one.kl.mean()) for one in windows]}
    for name, value in values.items():
        error = float(np.std([draw[name] for draw in draws])) if draws else None
        result.add(subject, contestant, name, runs.get(name, ()), value=value, error=error, **more)


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
        TAIL: tail,
        "kl_max": most,
        "same_top1": float(np.concatenate([one.same_top1 for one in windows]).mean()),
        "draft_acceptance": float(np.concatenate([one.accepted for one in windows]).mean()),
    }
