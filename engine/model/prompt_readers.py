"""Readers of the hidden states of a whole prompt: for the log-probabilities of its tokens, or for an embedding.

A reader's `read` gets hidden states (T, E), the rows of the positions from `first` on, in order, and may overwrite
them. Its `chunk` returns what was read, once all rows have been.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from polarlm.engine.backends.ops import Array
from polarlm.engine.model.batch import PromptBatch
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.model.forward import Transformer
from polarlm.engine.outputs import Chunk, TokenLogprob
from polarlm.engine.sampling.sample import token_logprob

_ROWS = 64  # rows read in a unit of work: 32 MiB of logits for a vocabulary of 128 K


def sigmoid(x: float) -> float:
    """σ(x) = 1 / (1 + exp(−x)), for x of any magnitude."""
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1 + small)


def read_chunks(model: Transformer, batch: PromptBatch, reader: PromptReader) -> Generator[int, None, Array]:
    """Run `Transformer.chunks` for a whole prompt, then parts of no rows, which read its hidden states. Returns the
    hidden state of the last token, (1, E)."""
    hidden = yield from model.chunks(batch)
    last = hidden[-1:].copy()
    for first in range(0, len(batch.ids), _ROWS):
        reader.read(model, hidden[first : first + _ROWS], first)
        yield 0
    return last


class PromptLogprobs:
    """Reads the log-probability of each token of a prompt after the first, and of the most likely ones in its place."""

    def __init__(self, ids: Sequence[int], count: int, vocabulary: int) -> None:
        """count: number of most likely tokens. vocabulary: the number of ids; logits may have more."""
        self._ids, self._count, self._vocabulary = ids, count, vocabulary
        self._logprobs: list[TokenLogprob] = []

    def read(self, model: Transformer, hidden: Array, first: int) -> None:
        following = self._ids[first + 1 : first + 1 + len(hidden)]
        if len(following) == 0:
            return
        logits = model.logits(hidden[: len(following)])[:, : self._vocabulary]
        self._logprobs += [token_logprob(row, token, self._count) for row, token in zip(logits, following, strict=True)]

    def chunk(self) -> Chunk:
        return Chunk("", (), prompt_ids=tuple(self._ids), prompt_logprobs=tuple(self._logprobs))


class Ranking:
    """Reads how likely a model is to answer a prompt with one token, and not with another."""

    def __init__(self, yes: int, no: int) -> None:
        self._tokens, self._score = [yes, no], 0.0

    def read(self, model: Transformer, hidden: Array, first: int) -> None:
        yes, no = model.logits(hidden[-1:])[0, self._tokens].astype(np.float64)
        self._score = sigmoid(yes - no)

    def chunk(self) -> Chunk:
        return Chunk("", (), embedding=np.array([self._score], np.float32))


class PairRelevance(Ranking):
    """Reads how relevant the second text of a pair is for the first: σ of the logit of a model's head."""

    def __init__(self) -> None:
        self._score = 0.0

    def read(self, model: Transformer, hidden: Array, first: int) -> None:
        assert isinstance(model, Encoder)
        if first == 0:
            self._score = sigmoid(model.relevance(hidden))


class Pooling:
    """Reads the embedding of a prompt, of length 1: the mean of its tokens' final hidden states, or one of them.
    Products of the model may follow the mean."""

    def __init__(self, kind: str, dimensions: int | None = None) -> None:
        """kind: "mean", "last", or "cls" for the first state. dimensions: the number of first ones to keep."""
        self._kind, self._dimensions, self._rows = kind, dimensions, 0
        self._total = np.zeros(())  # (E,) float64

    def read(self, model: Transformer, hidden: Array, first: int) -> None:
        states = model.final_states(hidden).astype(np.float64)
        self._after = model.after_pooling
        self._rows += len(states)
        if self._kind == "mean":
            self._total = self._total + states.sum(axis=0)
        elif self._kind == "last":
            self._total = states[-1]
        elif first == 0:
            self._total = states[0]

    def chunk(self) -> Chunk:
        vector = self._after(self._total / (self._rows if self._kind == "mean" else 1))[: self._dimensions]
        return Chunk("", (), embedding=(vector / (np.linalg.norm(vector) or 1.0)).astype(np.float32))


PromptReader = PromptLogprobs | Ranking | Pooling
