"""Hidden states of a text, in full precision and with a cache type, and the divergence that follows from them.

Logits are computed from hidden states a few rows at a time, so that all logits are never in memory together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.bench.quality.divergence import Divergence, compare
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.score import logprobs_of, states
from polarlm.engine.state.store import SequenceKV

_ROWS = 64  # rows of logits to compute at a time


@dataclass(frozen=True)
class Scored:
    """The score of a text each of whose ids after the first was predicted from the earlier ones."""

    logprobs: np.ndarray  # (T − 1,) float32: log-probabilities of the ids
    divergence: Divergence  # divergence of T − 1 distributions from full precision


def exact_states(model: Transformer, ids: Sequence[int]) -> np.ndarray:
    """Hidden states (T, E) of ids (T,) in one prefill, which reads its own keys and values in full precision."""
    sequence = model.store.new_sequence()
    try:
        span = model.store.open(sequence, len(ids))
        try:
            hidden = model.forward([span], ids)
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
        return hidden_of(model, sequence, ids, every_token_coded=every_token_coded)
    finally:
        model.store.release(sequence)


def hidden_of(
    model: Transformer, sequence: SequenceKV, ids: Sequence[int], *, every_token_coded: bool = False
) -> np.ndarray:
    """As `served_states`, of ids that continue a sequence, which is empty or ends with a complete block."""
    chunks = states(model, sequence, ids, every_token_coded=every_token_coded)
    return np.concatenate([np.array(model.ops.to_host(hidden)) for _, hidden in chunks])


def exact_logprobs(model: Transformer, hidden: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities (T − 1,) of the ids after the first, from hidden states (T, E)."""
    found = np.empty(len(ids) - 1, np.float32)
    for first in range(0, len(found), _ROWS):
        rows = slice(first, min(first + _ROWS, len(found)))
        found[rows] = logprobs_of(_logits(model, hidden[rows]), ids[rows.start + 1 : rows.stop + 1])
    return found


def scored(
    reference: Transformer, exact: np.ndarray, model: Transformer, hidden: np.ndarray, ids: Sequence[int]
) -> Scored:
    """The score of ids (T,) from their hidden states (T, E) in `model`, and from `exact` (T, E) of `reference`.

    The states of the last id predict nothing of the text and are ignored.
    """
    count = len(ids) - 1
    logprobs, kl, same = np.empty(count, np.float32), np.empty(count), np.empty(count, bool)
    for first in range(0, count, _ROWS):
        rows = slice(first, min(first + _ROWS, count))
        logits = _logits(model, hidden[rows])
        divergence = compare(_logits(reference, exact[rows]), logits)
        kl[rows], same[rows] = divergence.kl, divergence.same_top1
        logprobs[rows] = logprobs_of(logits, ids[rows.start + 1 : rows.stop + 1])
    return Scored(logprobs, Divergence(kl, same))


def divergence(model: Transformer, exact: np.ndarray, hidden: np.ndarray) -> Divergence:
    """The divergence of the distributions of hidden states (T, E) from those of `exact` (T, E), of the same model."""
    found = [
        compare(_logits(model, exact[first : first + _ROWS]), _logits(model, hidden[first : first + _ROWS]))
        for first in range(0, len(exact), _ROWS)
    ]
    return Divergence(np.concatenate([one.kl for one in found]), np.concatenate([one.same_top1 for one in found]))


def _logits(model: Transformer, hidden: np.ndarray) -> np.ndarray:
    return model.logits(model.ops.to_device(hidden))
