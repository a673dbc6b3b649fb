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
from polarlm.bench.quality.divergence import perplexity
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


@dataclass(frozen=True)
class Row:
    """The figures of one cache type with one scoring, over all windows. type: the label of a CacheType."""

    type: str
    bits_per_value: float  # bits of complete blocks as stored
    scored_as: str
    perplexity: float
    nll_per_token: float
    kl_mean: float  # nats
    kl_99th_percentile: float
    kl_999th_percentile: float | None  # None below 1,000 positions
    same_top1: float  # share of positions
    kl_by_position: list[Stretch]
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
            rows += _measure_type(reference, exact, cache_type, cut, recording, bar.update)
            if not logprobs:
                logprobs = [exact_logprobs(reference.transformer, exact(i), ids) for i, ids in enumerate(cut)]
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
    cache_type: CacheType,
    cut: Sequence[Sequence[int]],
    recording: Recording,
    progress: Callable[[], Any],
) -> list[Row]:
    """The rows of the type. exact: window → the reference's hidden states."""
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
        bits = engine.cache_stats().bits_per_value
    return [row_of(cache_type, bits, name, found[name], attention[name]) for name in SCORINGS]


def row_of(
    cache_type: CacheType, bits_per_value: float, scoring: str, windows: Sequence[Scored], attention: list[float]
) -> Row:
    """The figures of a type and scoring over all windows."""
    logprobs = np.concatenate([window.logprobs for window in windows])
    kl = np.concatenate([window.divergence.kl for window in windows])
    return Row(
        type=cache_type.label,
        bits_per_value=bits_per_value,
        scored_as=scoring,
        perplexity=perplexity(logprobs),
        nll_per_token=float(-np.mean(logprobs, dtype=np.float64)),
        kl_mean=float(kl.mean()),
        kl_99th_percentile=float(np.quantile(kl, 0.99)),
        kl_999th_percentile=float(np.quantile(kl, 0.999)) if len(kl) >= 1000 else None,
        same_top1=float(np.mean(np.concatenate([window.divergence.same_top1 for window in windows]))),
        kl_by_position=by_position([window.divergence.kl for window in windows], windows[0].first),
        attention_error=[float(f"{error:.4g}") for error in attention],
    )


def by_position(windows: Sequence[np.ndarray], first: int = 0) -> list[Stretch]:
    """The mean KL of windows (T,) of any lengths, over stretches of positions: 0 to 127, 128 to 255, 256 to 511, …

    first: the position of the windows' first figures.
    """
    end_of_all, edges = first + max(map(len, windows)), [0, FIRST_STRETCH]
    while edges[-1] < end_of_all:
        edges.append(2 * edges[-1])
    found = []
    for start, end in itertools.pairwise(edges):
        start, end = max(start, first), min(end, end_of_all)
        if start < end:
            kl = np.concatenate([window[start - first : end - first] for window in windows])
            found.append(Stretch(start, end, len(kl), float(kl.mean())))
    return found


def position_cells(rows: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table of KL by position. rows: label, and the stretches as dictionaries, which must be those
    of the same windows."""
    header = ["KL at positions", *(f"{one['start']:,} to {one['end'] - 1:,}" for one in rows[0][1])]
    return header, [[label, *(small(one["kl_mean"]) for one in stretches)] for label, stretches in rows]


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


def small(figure: float) -> str:
    """A divergence as text for a table."""
    return f"{figure:.1e}" if figure < 1e-3 else f"{figure:.4f}"
