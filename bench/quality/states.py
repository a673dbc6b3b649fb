"""Hidden states of a text, in full precision and with a cache type, and the divergence that follows from them.

Logits are computed from hidden states a few rows at a time, so that all logits are never in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.bench.quality.divergence import Divergence, compare, joined
from polarlm.engine.model.batch import PromptBatch, run_to_end
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.score import logprobs_of, states

_ROWS = 64  # rows of logits to compute at a time


@dataclass(frozen=True)
class Score:
    """The score of ids that were predicted from the earlier ids."""

    logprobs: np.ndarray  # (T,) float32: log-probabilities of the ids
    divergence: Divergence  # divergence of T distributions from full precision


def exact_states(model: Transformer, ids: Sequence[int]) -> np.ndarray:
    """Hidden states (T, E) of ids (T,) in one prefill, which reads its own keys and values in full precision."""
    sequence = model.store.new_sequence()
    try:
        span = model.store.open(sequence, len(ids))
        try:
            hidden = run_to_end(model.chunks(PromptBatch([span], ids)))
        except BaseException:
            model.store.abort(span)
            raise
        model.store.commit(span)
        return np.array(model.ops.to_host(hidden))
    finally:
        model.store.release(sequence)


def served_states(model: Transformer, ids: Sequence[int], *, every_token_coded: bool = False) -> np.ndarray:
    """Hidden states (T, E) of ids (T,) as steps compute them; every_token_coded: see `engine.model.score.states`."""
    sequence = model.store.new_sequence()
    try:
        chunks = states(model, sequence, ids, every_token_coded=every_token_coded)
        return np.concatenate([np.array(model.ops.to_host(hidden)) for _, hidden in chunks])
    finally:
        model.store.release(sequence)


def _pieces(end: int) -> Iterator[slice]:
    """Yield the positions from 0 to `end` − 1, as many at a time as are computed together."""
    for start in range(0, end, _ROWS):
        yield slice(start, min(start + _ROWS, end))


def logits_of(model: Transformer, hidden: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the logits of hidden states (T, E), (rows, V) float32, a few rows at a time."""
    for rows in _pieces(len(hidden)):
        yield _logits(model, hidden[rows])


def _following(ids: Sequence[int], rows: slice) -> Sequence[int]:
    """The ids after those at positions `rows`."""
    return ids[rows.start + 1 : rows.stop + 1]


def exact_logprobs(model: Transformer, hidden: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities (T − 1,) of the ids after the first, from hidden states (T, E)."""
    pieces = _pieces(len(ids) - 1)
    return np.concatenate([logprobs_of(_logits(model, hidden[rows]), _following(ids, rows)) for rows in pieces])


def score_of(
    reference: Transformer, exact: np.ndarray, model: Transformer, hidden: np.ndarray, ids: Sequence[int]
) -> Score:
    """The score of ids (T,) from their hidden states (T, E) in `model`, and from `exact` (T, E) of `reference`.

    The states of the last id predict nothing of the text and are ignored.
    """
    logprobs, parts = [], []
    for rows in _pieces(len(ids) - 1):
        logits = _logits(model, hidden[rows])
        parts.append(compare(_logits(reference, exact[rows]), logits))
        logprobs.append(logprobs_of(logits, _following(ids, rows)))
    return Score(np.concatenate(logprobs), joined(parts))


def _logits(model: Transformer, hidden: np.ndarray) -> np.ndarray:
    return model.logits(model.ops.to_device(hidden))
