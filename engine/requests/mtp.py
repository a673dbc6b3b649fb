"""Drafts by the model's layer that predicts several tokens, see `engine.model.mtp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.model.mtp import MtpLayer
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.store import SequenceKV


class MtpDrafter:
    """Drafts the most likely tokens of one request; none after a pause, until a step has computed a hidden state.

    Its rows are in a span that is aborted: the step that verifies them opens another one, at the same place.
    """

    def __init__(self, layer: MtpLayer, kv: Callable[[], SequenceKV | None]) -> None:
        """kv: returns the request's sequence in the engine's store, if it has one."""
        self._layer, self._kv = layer, kv

    def is_ready(self, ids: Sequence[int]) -> bool:
        return True

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        kv, guesses = self._kv(), list[int]()
        if kv is None or kv.hidden is None or kv.length != len(ids) - 1:
            return ()
        hidden = kv.hidden
        try:
            span = self._layer.store.open_step(kv, most)
        except OutOfBlocks:
            return ()
        try:
            while len(guesses) < most:
                row = span.part(len(guesses), 1)
                token, hidden = self._layer.draft(row, guesses[-1] if guesses else ids[-1], hidden)
                if not isinstance(token, int):  # it is an error, which the model's own row has too if it is the model's
                    break
                guesses.append(token)
        finally:
            self._layer.store.abort(span)
        return guesses

    def release(self) -> None:
        """It holds no blocks."""
