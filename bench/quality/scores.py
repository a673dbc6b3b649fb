"""Perplexity of cache types on windows of a text, and their divergence from full precision."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.quality.divergence import Divergence, perplexity
from polarlm.bench.quality.figures import Figures, error_of, figures
from polarlm.bench.quality.states import Scored

SERVED, CODED = "as served", "every token coded"
FIRST_STRETCH = 128  # positions; each further stretch has as many as all earlier ones together


@dataclass(frozen=True)
class Stretch:
    """The divergence at positions start, …, end − 1, over all windows that reach them.

    Position t has the distribution of the token after t + 1 tokens of context.
    """

    start: int
    end: int  # the last stretch ends with the longest window
    positions: int  # number of positions in all windows
    kl_mean: float  # nats
    kl_error: float | None  # standard error of kl_mean over windows; None for a single window
    same_top1: float  # share of the positions
    top1_error: float | None  # standard error of same_top1 over windows


@dataclass(frozen=True)
class Row(Figures):
    """The figures of one cache type with one scoring, over all windows. type: the label of a CacheType."""

    type: str
    bits_per_value: float  # bits of complete blocks as stored; by age, over a window
    scored_as: str  # SERVED, or CODED where the current block is read as codes, too
    perplexity: float
    perplexity_error: float | None
    """The standard error of the ratio to full precision's perplexity, times that perplexity; None if there is a single
    window."""
    nll_per_token: float
    by_position: list[Stretch]


@dataclass(frozen=True)
class Quality:
    """The results of a measurement."""

    scored_tokens: int
    exact_perplexity: float  # in full precision
    rows: list[Row]


def windows(ids: Sequence[int], window: int, bos_id: int | None) -> list[list[int]]:
    """Consecutive windows of at most `window` ids; the last may be shorter, but has an id to predict.

    With a BOS every window starts with it and has one text id less, so that every text id is predicted; without, the
    first id of a window is not predicted.
    """
    start = [] if bos_id is None else [bos_id]
    step = window - len(start)
    cut = [[*start, *ids[first : first + step]] for first in range(0, len(ids), step)]
    return [ids_of_window for ids_of_window in cut if len(ids_of_window) >= 2]


def row_of(
    cache_type: CacheType, bits_per_value: float, scoring: str, windows: Sequence[Scored], exact: Sequence[np.ndarray]
) -> Row:
    """The figures of a type and scoring over all windows. exact: full precision's log-probabilities of each window."""
    exact = exact[: len(windows)]
    logprobs = np.concatenate([window.logprobs for window in windows])

    def ratio(chosen: np.ndarray) -> float:
        ours, full = (np.concatenate([each[i] for i in chosen]) for each in ([w.logprobs for w in windows], exact))
        return perplexity(ours) / perplexity(full)

    error = error_of(ratio, len(windows))
    return Row(
        **vars(figures([window.divergence for window in windows])),
        type=cache_type.label,
        bits_per_value=bits_per_value,
        scored_as=scoring,
        perplexity=perplexity(logprobs),
        perplexity_error=None if error is None else error * perplexity(np.concatenate(exact)),
        nll_per_token=float(-np.mean(logprobs, dtype=np.float64)),
        by_position=by_position([window.divergence for window in windows], windows[0].first),
    )


def by_position(windows: Sequence[Divergence], first: int = 0) -> list[Stretch]:
    """The divergence of windows of any lengths, over stretches of positions: 0 to 127, 128 to 255, 256 to 511, …

    first: the position of the windows' first figures.
    """
    end_of_all, edges = first + max(len(window.kl) for window in windows), [0, FIRST_STRETCH]
    while edges[-1] < end_of_all:
        edges.append(2 * edges[-1])
    stretches = []
    for start, end in itertools.pairwise(edges):
        start, end = max(start, first), min(end, end_of_all)
        if start < end:
            places = slice(start - first, end - first)
            reaching = [window for window in windows if len(window.kl[places])]
            kl, kl_error = _mean([window.kl[places] for window in reaching])
            same, same_error = _mean([window.same_top1[places] for window in reaching])
            count = sum(len(window.kl[places]) for window in reaching)
            stretches.append(Stretch(start, end, count, kl, kl_error, same, same_error))
    return stretches


def _mean(windows: Sequence[np.ndarray]) -> tuple[float, float | None]:
    def mean_of(chosen: np.ndarray) -> float:
        return float(np.concatenate([windows[i] for i in chosen]).mean())

    return mean_of(np.arange(len(windows))), error_of(mean_of, len(windows))
