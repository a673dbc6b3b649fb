"""Windows of a text, how many there is time for, and what cache types cost on them, as rows of a result."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polarlm.bench.quality.divergence import Divergence, add_figures, error_of, perplexity
from polarlm.bench.quality.states import Score
from polarlm.bench.result import Result

SERVED, CODED = "as served", "every token coded"
TEXT, POSITIONS, KIND = "text", "positions", "kind"  # subjects
FIRST_STRETCH = 128  # positions; each further stretch has as many as all earlier ones together


def contestant(cache_type: str, scoring: str) -> str:
    """The name of a type with its scoring, unless it is as served."""
    return cache_type if scoring == SERVED else f"{cache_type}, {scoring}"


def windows(ids: Sequence[int], window: int, bos_id: int | None) -> list[list[int]]:
    """Consecutive windows of at most `window` ids; the last may be shorter, but has an id to predict.

    With a BOS every window starts with it and has one text id less, so that every text id is predicted; without, the
    first id of a window is not predicted.
    """
    start = [] if bos_id is None else [bos_id]
    step = window - len(start)
    cut = [[*start, *ids[first : first + step]] for first in range(0, len(ids), step)]
    return [ids_of_window for ids_of_window in cut if len(ids_of_window) >= 2]


def by_turns(texts: Mapping[str, Sequence[list[int]]]) -> list[tuple[str, list[int]]]:
    """The windows of texts with their texts' names: the first of each, then the second of each, and so on."""
    turns = itertools.zip_longest(*([(name, window) for window in own] for name, own in texts.items()))
    return [one for turn in turns for one in turn if one is not None]


def add_scores(result: Result, who: str, bits: float, windows: Sequence[Score], exact: Sequence[np.ndarray]) -> None:
    """Add the rows of a type and scoring over all windows, and over stretches of their positions.

    bits: per value, of a window's complete blocks, of which recent ones have 16. exact: full precision's
    log-probabilities of each window. The error of the perplexity is that of its ratio to full precision's, times that.
    """
    exact = exact[: len(windows)]
    logprobs = np.concatenate([window.logprobs for window in windows])

    def ratio(chosen: np.ndarray) -> float:
        ours, full = (np.concatenate([each[i] for i in chosen]) for each in ([w.logprobs for w in windows], exact))
        return perplexity(ours) / perplexity(full)

    divergences, error = [window.divergence for window in windows], error_of(ratio, len(windows))
    add_figures(result, TEXT, who, divergences)
    result.add(TEXT, who, "bits_per_value", value=bits)
    error = None if error is None else error * perplexity(np.concatenate(exact))
    result.add(TEXT, who, "perplexity", value=perplexity(logprobs), error=error)
    nll = [float(-np.mean(window.logprobs, dtype=np.float64)) for window in windows]
    result.add(TEXT, who, "nll_per_token", nll, value=float(-np.mean(logprobs, dtype=np.float64)))
    add_stretches(result, who, divergences)


def add_kinds(result: Result, who: str, windows: Sequence[Score], kinds: Sequence[str]) -> None:
    """Add the divergences of the windows of each kind of text, if there are several."""
    names = dict.fromkeys(kinds[: len(windows)])
    for name in names if len(names) > 1 else ():
        chosen = [window.divergence for window, kind in zip(windows, kinds, strict=False) if kind == name]
        add_figures(result, f"{KIND} {name}", who, chosen)


def add_stretches(result: Result, who: str, windows: Sequence[Divergence]) -> None:
    """Add the divergence of windows of any lengths, over stretches of positions: 0 to 127, 128 to 255, 256 to 511, …

    Position t has the distribution of the token after t + 1 tokens of context.
    """
    end_of_all, edges = max(len(window.kl) for window in windows), [0, FIRST_STRETCH]
    while edges[-1] < end_of_all:
        edges.append(2 * edges[-1])
    for start, end in itertools.pairwise(edges):
        end = min(end, end_of_all)
        reaching = [window[start:end] for window in windows if len(window.kl[start:end])]
        more: dict[str, Any] = {"start": start, "end": end, "positions": sum(len(window.kl) for window in reaching)}
        for name, parts in (
            ("kl_mean", [one.kl for one in reaching]),
            ("same_top1", [one.same_top1 for one in reaching]),
        ):
            value, error = _mean(parts)
            subject = f"{POSITIONS} {start:,} to {end - 1:,}"
            result.add(subject, who, name, value=value, error=error, **more)


def _mean(windows: Sequence[np.ndarray]) -> tuple[float, float | None]:
    def mean_of(chosen: np.ndarray) -> float:
        return float(np.concatenate([windows[i] for i in chosen]).mean())

    return mean_of(np.arange(len(windows))), error_of(mean_of, len(windows))


LEAST, MOST = 512, 2048  # tokens of a window
_DOUBLES = 3000  # tokens of a window for which a token takes twice as long on average


@dataclass(frozen=True)
class Windows:
    """Windows of a text, and the seconds that scoring them is expected to take."""

    count: int
    length: int  # tokens
    seconds: float


def choose(seconds: float, token_seconds: float, text_tokens: int, max_context: int) -> Windows:
    """As many windows as there is time for, at least one, and the longest windows that there is time for.

    token_seconds: seconds per token in a short window.
    """
    most = min(MOST, max_context, text_tokens)
    length = most
    while length > LEAST and seconds < window_seconds(token_seconds, length):
        length = max(LEAST, length // 2)
    return windows_of_length(length, seconds, token_seconds, text_tokens // length)


def windows_of_length(length: int, seconds: float, token_seconds: float, most: int) -> Windows:
    """As many windows of `length` tokens as there is time for; at least one, and `most` at most."""
    each = window_seconds(token_seconds, length)
    count = max(1, min(int(seconds / each), most))
    return Windows(count, length, count * each)


def window_seconds(token_seconds: float, length: int) -> float:
    """The expected seconds of a window of `length` tokens."""
    return token_seconds * length * (1 + length / _DOUBLES)
