"""Drafts of a model's own layer for multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np

from polarlm.engine.model.layers.mtp import MtpLayer, MtpRow
from polarlm.engine.requests.drafters.drafter import StepDrafter
from polarlm.engine.sampling.sample import Sampled
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.store import SequenceKV


class MtpDrafter(StepDrafter):
    """Drafts the most likely tokens of one request; none after a pause, until a step has computed a hidden state.

    Its rows are in a span that is aborted: the step that verifies them opens another one, at the same place.
    """

    def __init__(self, layer: MtpLayer, vocabulary: int, kv: Callable[[], SequenceKV | None]) -> None:
        """vocabulary: the number of ids. kv: returns the request's sequence in the engine's store, if it has one."""
        self._layer, self._vocabulary, self._kv = layer, vocabulary, kv

    def steps(self, ids: Sequence[int], most: int) -> Generator[MtpRow, tuple[Sampled, np.ndarray], Sequence[int]]:
        kv, guesses = self._kv(), list[int]()
        if kv is None or kv.hidden is None or kv.length != len(ids) - 1:
            return ()
        layer = self._layer
        if not layer.has_kv and kv.length == layer.store.first_of_block(kv):  # the K/V before it are in another block
            return ()
        hidden = kv.hidden
        try:
            span = self._layer.store.open_step(kv, most)
        except OutOfBlocks:
            return ()
        try:
            while len(guesses) < most:
                row = span.part(len(guesses) if layer.has_kv else 0, 1)
                token, hidden = yield MtpRow(row, guesses[-1] if guesses else ids[-1], hidden)
                if not isinstance(token, int):  # it is an error, which the model's own row has too if it is the model's
                    break
                if token >= self._vocabulary:  # the head may have rows that are no tokens
                    break
                guesses.append(token)
        finally:
            self._layer.store.abort(span)
        return guesses

    def compute(self, rows: Sequence[MtpRow]) -> Sequence[tuple[Sampled, np.ndarray]]:
        return self._layer.draft(rows)
