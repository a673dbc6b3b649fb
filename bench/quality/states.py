"""Hidden states of a text, in full precision and with a cache type, and the divergence that follows from them.

Logits are computed from hidden states a few rows at a time, so that all logits are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polarlm.bench.quality.divergence import Divergence, compare, compare_stored, joined
from polarlm.bench.quality.kld_file import KldFile
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.score import logprobs_of, states
from polarlm.engine.state.store import SequenceKV, Span

_ROWS = 64  # rows of logits to compute at a time


@dataclass(frozen=True)
class Score:
    """The score of ids that were predicted from the earlier ids."""

    logprobs: np.ndarray  # (T,) float32: log-probabilities of the ids
    divergence: Divergence  # divergence of T distributions from full precision
    first: int = 0  # the position in the window of the first distribution


def exact_states(model: Transformer, ids: Sequence[int]) -> np.ndarray:
    """Hidden states (T, E) of ids (T,) in one prefill, which reads its own keys and values in full precision."""
    sequence = model.store.new_sequence()
    try:
        return np.array(model.ops.to_host(forward(model, model.store.open(sequence, len(ids)), ids)))
    finally:
        model.store.release(sequence)


def forward(model: Transformer, span: Span, ids: Sequence[int]) -> Any:
    """Hidden states (T, E), on the device, of ids (T,) of an open span, which is committed, or aborted by an error."""
    try:
        hidden = model.forward([span], ids)
    except BaseException:
        model.store.abort(span)
        raise
    model.store.commit(span)
    return hidden


def served_states(model: Transformer, ids: Sequence[int], *, every_token_coded: bool = False) -> np.ndarray:
    """Hidden states (T, E) of ids (T,) as steps compute them; every_token_coded: see `engine.model.score.states`."""
    sequence = model.store.new_sequence()
    try:
        return hidden_of(model, sequence, ids, every_token_coded=every_token_coded)
    finally:
        model.store.release(sequence)


def hidden_of(
    model: Transformer, sequence: SequenceKV, ids: Sequence[int], *, every_token_coded: bool = False
) -> np.ndarray:
    """As `served_states`, of ids that continue a sequence, which is empty or ends with a complete block."""
    chunks = states(model, sequence, ids, every_token_coded=every_token_coded)
    return np.concatenate([np.array(model.ops.to_host(hidden)) for _, hidden in chunks])


def _pieces(first: int, end: int) -> Iterator[slice]:
    """Yield the positions from `first` to `end` − 1, as many at a time as are computed together."""
    for start in range(first, end, _ROWS):
        yield slice(start, min(start + _ROWS, end))


def logits_of(model: Transformer, hidden: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the logits of hidden states (T, E), (rows, V) float32, a few rows at a time."""
    for rows in _pieces(0, len(hidden)):
        yield _logits(model, hidden[rows])


def _following(ids: Sequence[int], rows: slice) -> Sequence[int]:
    """The ids after those at positions `rows`."""
    return ids[rows.start + 1 : rows.stop + 1]


def exact_logprobs(model: Transformer, hidden: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities (T − 1,) of the ids after the first, from hidden states (T, E)."""
    pieces = _pieces(0, len(ids) - 1)
    return np.concatenate([logprobs_of(_logits(model, hidden[rows]), _following(ids, rows)) for rows in pieces])


def stored_logprobs(base: KldFile, window: int, ids: Sequence[int]) -> np.ndarray:
    """A file's log-probabilities (rows,) of the ids that its rows of a window predict. ids: all of the window."""
    parts = []
    for rows in _pieces(base.first, len(ids) - 1):
        following = np.asarray(_following(ids, rows))[:, None]
        parts.append(np.take_along_axis(_logprobs(base, window, rows), following, axis=1)[:, 0])
    return np.concatenate(parts)


def _logprobs(base: KldFile, window: int, rows: slice) -> np.ndarray:
    return base.logprobs(window, rows.start - base.first, rows.stop - base.first)


def score_of(
    reference: Transformer, exact: np.ndarray, model: Transformer, hidden: np.ndarray, ids: Sequence[int]
) -> Score:
    """The score of ids (T,) from their hidden states (T, E) in `model`, and from `exact` (T, E) of `reference`.

    The states of the last id predict nothing of the text and are ignored.
    """
    return _score_of(lambda rows, logits: compare(_logits(reference, exact[rows]), logits), model, hidden, ids)


def score_against(base: KldFile, window: int, model: Transformer, hidden: np.ndarray, ids: Sequence[int]) -> Score:
    """The score of a window of a file, ids (T,), from their hidden states (T, E) in `model`."""

    def compare_rows(rows: slice, logits: np.ndarray) -> Divergence:
        return compare_stored(_logprobs(base, window, rows), logits)

    return _score_of(compare_rows, model, hidden, ids, base.first)


def _score_of(
    compared: Callable[[slice, np.ndarray], Divergence],
    model: Transformer,
    hidden: np.ndarray,
    ids: Sequence[int],
    first: int = 0,
) -> Score:
    """The score of the ids after position `first`. compared: positions, and the model's logits there → divergence."""
    logprobs, parts = [], []
    for rows in _pieces(first, len(ids) - 1):
        logits = _logits(model, hidden[rows])
        parts.append(compared(rows, logits))
        logprobs.append(logprobs_of(logits, _following(ids, rows)))
    return Score(np.concatenate(logprobs), joined(parts), first)


def divergence(model: Transformer, exact: np.ndarray, hidden: np.ndarray) -> Divergence:
    """The divergence of the distributions after hidden states (T, E) from `exact` (T, E), in the same model."""
    return joined([compare(*both) for both in zip(logits_of(model, exact), logits_of(model, hidden), strict=True)])


def _logits(model: Transformer, hidden: np.ndarray) -> np.ndarray:
    return model.logits(model.ops.to_device(hidden))
