"""Perplexity, divergence from full precision, and attention error of cache types on windows of a text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import CacheType
from polarlm.bench.quality.attention_error import Recording, Replay
from polarlm.bench.quality.divergence import Divergence, perplexity
from polarlm.bench.quality.figures import Figures, error_of, figures
from polarlm.bench.quality.reference import Reference
from polarlm.bench.quality.states import Scored, exact_logprobs, exact_states, scored, served_states
from polarlm.engine import Score

_KEPT_LOGITS = 2 << 30  # most bytes of logits to keep

# Scoring → `every_token_coded` of Engine.score.
SCORINGS = {"as served": False, "every token coded": True}


FIRST_STRETCH = 128  # positions; each further stretch has as many as all earlier ones together


@dataclass(frozen=True)
class Stretch:
    """The divergence at positions start, …, end − 1, over all windows that reach them.

    Position t has the distribution of the token after t + 1 tokens of context.
    """

    start: int
    end: int  # in the last stretch, that of the longest window
    positions: int  # number of positions in all windows
    kl_mean: float  # nats
    kl_error: float | None  # its standard error over windows; None for a single one
    same_top1: float  # share of the positions
    top1_error: float | None  # likewise


@dataclass(frozen=True)
class Row(Figures):
    """The figures of one cache type with one scoring, over all windows. type: the label of a CacheType."""

    type: str
    bits_per_value: float  # bits of complete blocks as stored; by age, over a window
    scored_as: str
    perplexity: float
    perplexity_error: float | None
    """The standard error of its ratio to full precision's, times the latter; None if there is a single window."""
    nll_per_token: float
    by_position: list[Stretch]
    attention_error: list[float]  # relative, for each layer, over the first window; empty if it was not measured


@dataclass(frozen=True)
class Quality:
    """The results of a measurement."""

    scored_tokens: int
    exact_perplexity: float  # the reference's
    rows: list[Row]


def windows(ids: Sequence[int], window: int, bos_id: int | None) -> list[list[int]]:
    """Consecutive windows of at most `window` ids; the last may be shorter, but has an id to predict.

    With a BOS every window starts with it and has one text id less, so that every text id is predicted; without, the
    first id of a window is not predicted.
    """
    start = [] if bos_id is None else [bos_id]
    step = window - len(start)
    cut = [[*start, *ids[first : first + step]] for first in range(0, len(ids), step)]
    return [one for one in cut if len(one) >= 2]


def measure(
    reference: Reference,
    types: Sequence[CacheType],
    cut: Sequence[Sequence[int]],
    recording: Recording | None = None,
    on_progress: Callable[[Quality], None] = lambda quality: None,
) -> Quality:
    """Score the windows `cut` (ids with BOS) with every type. recording: of the first window, if it was made already.

    on_progress: called after each type with all results so far.

    The types' engines are loaded in turn, so two copies of the weights are in memory. The reference's hidden states,
    (window, E) float32 for each window, are kept for all types. Raises FlagError or EngineError.
    """
    for cache_type in types:
        cache_type.check(reference.model.config.attention.head_dim)
    recording = recording or reference.record(cut[0])
    rows: list[Row] = []
    logprobs: list[np.ndarray] = []

    exact = functools.cache(lambda window: exact_states(reference.transformer, cut[window]))
    with tqdm(total=len(types) * passes(len(cut)), desc="Scoring", unit="window", disable=None) as bar:
        for cache_type in types:
            bar.set_postfix_str(cache_type.label)
            if not logprobs:
                logprobs = [exact_logprobs(reference.transformer, exact(i), ids) for i, ids in enumerate(cut)]
            rows += _measure_type(reference, exact, logprobs, cache_type, cut, recording, bar.update)
            quality = Quality(sum(map(len, logprobs)), perplexity(np.concatenate(logprobs)), list(rows))
            on_progress(quality)
    return quality


def kept_scores(reference: Reference, cut: Sequence[Sequence[int]]) -> Callable[[int], Score]:
    """A function: i → the reference's score of window i of `cut`, cached if the logits of all take at most 2 GiB."""

    def score(window: int) -> Score:
        return reference.score(cut[window])

    fits = 4 * reference.model.config.vocab_size * sum(map(len, cut)) <= _KEPT_LOGITS
    return functools.cache(score) if fits else score


def passes(windows: int) -> int:
    """The number of passes over windows per type: reference and scorings, and attention errors of the first window."""
    return windows * (1 + len(SCORINGS)) + len(SCORINGS)


def one_line(row: Row, exact_perplexity: float) -> str:
    """A row as a line of text."""
    change = 100 * (row.perplexity / exact_perplexity - 1)
    return f"{row.type}, {row.scored_as}: perplexity {change:+.2f} %, KL {small(row.kl_mean)}"


def _measure_type(
    reference: Reference,
    exact: Callable[[int], np.ndarray],
    logprobs: Sequence[np.ndarray],
    cache_type: CacheType,
    cut: Sequence[Sequence[int]],
    recording: Recording,
    progress: Callable[[], Any],
) -> list[Row]:
    """The rows of the type. exact: window → the reference's hidden states; logprobs: its log-probabilities."""
    found: dict[str, list[Scored]] = {name: [] for name in SCORINGS}
    attention: dict[str, list[float]] = {}
    replay = Replay()
    longest = max(map(len, cut))
    settings = {"ctx_size": longest, "kept_sequences": 0, **cache_type.settings()}
    with reference.open(replay.install, encoding=cache_type.encoding, **settings) as engine:
        for window, ids in enumerate(cut):
            expected = exact(window)
            progress()
            for name, coded in SCORINGS.items():
                hidden = served_states(replay.model, ids, every_token_coded=coded)
                found[name].append(scored(reference.transformer, expected, replay.model, hidden, ids))
                progress()
        for name, coded in SCORINGS.items():
            attention[name] = replay.errors(engine, cut[0], recording, every_token_coded=coded)
            progress()
        bits = engine.cache_shape.bits_of_text(longest)
    return [row_of(cache_type, bits, name, found[name], logprobs, attention[name]) for name in SCORINGS]


def row_of(
    cache_type: CacheType,
    bits_per_value: float,
    scoring: str,
    windows: Sequence[Scored],
    exact: Sequence[np.ndarray],
    attention: list[float],
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
        attention_error=[float(f"{error:.4g}") for error in attention],
    )


def by_position(windows: Sequence[Divergence], first: int = 0) -> list[Stretch]:
    """The divergence of windows of any lengths, over stretches of positions: 0 to 127, 128 to 255, 256 to 511, …

    first: the position of the windows' first figures.
    """
    end_of_all, edges = first + max(len(one.kl) for one in windows), [0, FIRST_STRETCH]
    while edges[-1] < end_of_all:
        edges.append(2 * edges[-1])
    found = []
    for start, end in itertools.pairwise(edges):
        start, end = max(start, first), min(end, end_of_all)
        if start < end:
            places = slice(start - first, end - first)
            reaching = [window for window in windows if len(window.kl[places])]
            kl, kl_error = _mean([window.kl[places] for window in reaching])
            same, same_error = _mean([window.same_top1[places] for window in reaching])
            count = sum(len(window.kl[places]) for window in reaching)
            found.append(Stretch(start, end, count, kl, kl_error, same, same_error))
    return found


def _mean(windows: Sequence[np.ndarray]) -> tuple[float, float | None]:
    """The mean of all windows' figures, and its standard error."""

    def of_windows(chosen: np.ndarray) -> float:
        return float(np.concatenate([windows[i] for i in chosen]).mean())

    return of_windows(np.arange(len(windows))), error_of(of_windows, len(windows))


Positions = Sequence[tuple[str, Sequence[Mapping[str, Any]]]]
"""Label, and the stretches as dictionaries; those of all labels are of the same windows."""


def kl_by_position(rows: Positions) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of KL by position."""
    return _position_cells("KL at positions", rows, lambda one: with_error(one["kl_mean"], one.get("kl_error"), small))


def top1_by_position(rows: Positions) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of the same top-1 by position."""
    return _position_cells(
        "same top-1 at positions", rows, lambda one: with_error(one["same_top1"], one["top1_error"], two_digits)
    )


def _position_cells(
    title: str, rows: Positions, cell: Callable[[Mapping[str, Any]], str]
) -> tuple[list[str], list[list[str]]]:
    header = [title, *(f"{one['start']:,} to {one['end'] - 1:,}" for one in rows[0][1])]
    return header, [[label, *map(cell, stretches)] for label, stretches in rows]


def format_table(quality: Quality) -> str:
    """A table of all figures. The change of perplexity is relative to the float32 prefill."""
    header = ["cache type", "scored", "bits/value", "PPL", "change", "KL mean", "KL 99 %", "same top-1"]
    header += ["attention error", "worst layer"]
    first = ("float32 prefill", "reference", "—", f"{quality.exact_perplexity:.3f}", "—", "0", "0", "100.0 %", "0", "0")
    rows = [
        (
            row.type,
            row.scored_as,
            f"{row.bits_per_value:.3f}",
            f"{row.perplexity:.3f}",
            f"{100 * (row.perplexity / quality.exact_perplexity - 1):+.2f} %",
            small(row.kl_mean),
            small(row.kl_99th_percentile),
            f"{100 * row.same_top1:.1f} %",
            small(float(np.mean(row.attention_error))),
            small(max(row.attention_error)),
        )
        for row in quality.rows
    ]
    return report.table(header, [first, *rows])


def with_error(figure: float, error: float | None, text: Callable[[float], str]) -> str:
    """A figure and its standard error as text for a table."""
    return text(figure) if error is None else f"{text(figure)} ± {text(error)}"


KL_FIGURES = ("kl_mean", "kl_median", "kl_90th_percentile", "kl_99th_percentile", "kl_999th_percentile", "kl_max")


def kl_cells(figures: Mapping[str, Any]) -> list[str]:
    """KL_FIGURES of `Figures` as a dictionary, each with its error, as text for a table."""
    found, errors = [], figures["errors"] or {}
    for name in KL_FIGURES:
        figure = figures[name]
        found.append("—" if figure is None else with_error(figure, errors.get(name), small) if figure else "0")
    return found


def two_digits(share: float) -> str:
    """A share as text for a table: percent with two digits after the point."""
    return f"{100 * share:.2f} %"


def small(figure: float) -> str:
    """A divergence as text for a table."""
    return f"{figure:.1e}" if figure < 1e-3 else f"{figure:.4f}"
