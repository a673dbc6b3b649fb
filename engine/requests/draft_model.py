"""Models that draft: a second, smaller one, which generates the tokens that the engine's model verifies, or a layer of
that model itself, see `engine.model.layers.mtp`.

The smaller one's K/V are in a store of its own. The K/V of rejected tokens are discarded before the next draft; they
are all in the current block, where a draft ends. Layers with a window may then attend to as many tokens fewer: a draft
may be worse, but the answer stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.limits import DRAFT_ROWS, MOST_DRAFTED
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.layers.mtp import MtpLayer
from polarlm.engine.sampling.sample import Sampled, greedy
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.store import SequenceKV


class ModelDrafter:
    """Drafts the most likely tokens of one request, each by a step of the draft model; none if its store has no
    room."""

    def __init__(self, model: Transformer, vocabulary: int) -> None:
        """model: the draft model, which all requests share. vocabulary: the number of ids."""
        self._model, self._store = model, model.store
        self._sampler_input = greedy(vocabulary)
        self._kv: SequenceKV | None = None
        self._stored: list[int] = []  # the ids whose K/V are stored

    def is_ready(self, ids: Sequence[int]) -> bool:
        return True

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        try:
            kv = self._common(ids)
            guesses: list[int] = []
            token = self._compute(kv, ids[kv.length :])
            while isinstance(token, int):
                guesses.append(token)
                if len(guesses) == most:
                    break
                token = self._compute(kv, [token])
        except OutOfBlocks:
            self.release()
            return ()
        return guesses

    def release(self) -> None:
        if self._kv is not None:
            self._store.release(self._kv)
        self._kv, self._stored = None, []

    def _common(self, ids: Sequence[int]) -> SequenceKV:
        """Return the K/V of the longest stored prefix of `ids[:-1]`, and discard the K/V of other tokens."""
        stored, same = self._stored, max(0, len(self._stored) - MOST_DRAFTED)  # earlier tokens were verified
        while same < min(len(stored), len(ids) - 1) and stored[same] == ids[same]:
            same += 1
        if self._kv is not None and same < len(stored):
            if same < self._store.first_of_block(self._kv):
                self.release()
            else:
                self._store.truncate(self._kv, same)
                del stored[same:]
        if self._kv is None:
            self._kv = self._store.new_sequence()
        return self._kv

    def _compute(self, kv: SequenceKV, ids: Sequence[int]) -> Sampled:
        """Compute the rows of `ids`, which follow `kv`, and return the most likely next token. Raises OutOfBlocks."""
        if len(ids) > MOST_DRAFTED:
            span = self._store.open(kv, len(ids) - 1)
            try:
                self._model.forward([span], ids[:-1], outputs=1)
                self._store.commit(span)
            finally:
                self._store.abort(span)  # does nothing after a commit
            self._stored += ids[:-1]
            ids = ids[-1:]
        sampled: Sampled = -1
        while ids:
            room = min(len(ids), self._store.rows_of_block(kv))
            now = ids[: max(rows for rows in (1, *DRAFT_ROWS) if rows <= room)]  # those that have kernels
            span = self._store.open_step(kv, len(now))
            try:
                *_, sampled = self._model.step([span], now, [self._sampler_input] * len(now))
                self._store.commit(span)
            finally:
                self._store.abort(span)
            self._stored += now
            ids = ids[len(now) :]
        return sampled


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
