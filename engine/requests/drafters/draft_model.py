"""Drafts of a second, smaller model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from polarlm.engine.limits import DRAFT_ROWS, MOST_DRAFTED
from polarlm.engine.model.batch import PromptBatch, StepBatch, run_to_end
from polarlm.engine.model.forward import Transformer
from polarlm.engine.requests.drafters.drafter import StepDrafter
from polarlm.engine.sampling.sample import Sampled, greedy
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.store import SequenceKV, Span


class StepRows(NamedTuple):
    """The rows of one request in a step of the draft model: where they go, and their tokens."""

    span: Span
    ids: Sequence[int]


class ModelDrafter(StepDrafter):
    """Drafts the most likely tokens of one request, each by a step of a second, smaller model; none if its store has no
    room.

    K/V of rejected tokens are discarded before the next draft; they are all in the current block, where a draft ends.
    Layers with a window may then attend to as many tokens fewer: a draft may be worse, but the answer stays the same.
    """

    def __init__(self, model: Transformer, vocabulary: int) -> None:
        """model: the draft model, which all requests share. vocabulary: the number of ids."""
        self._model, self._store = model, model.store
        self._sampler_input = greedy(vocabulary)
        self._kv: SequenceKV | None = None
        self._stored: list[int] = []  # the ids whose K/V are stored

    def steps(self, ids: Sequence[int], most: int) -> Generator[StepRows, Sampled, Sequence[int]]:
        guesses: list[int] = []
        try:
            kv = self._common(ids)
            token = yield from self._append(kv, ids[kv.length :])
            while isinstance(token, int):
                guesses.append(token)
                if len(guesses) == most:
                    break
                token = yield from self._append(kv, [token])
        except OutOfBlocks:
            self.release()
            return ()
        return guesses

    def compute(self, rows: Sequence[StepRows]) -> Sequence[Sampled]:
        ids = [*chain.from_iterable(one.ids for one in rows)]
        step = StepBatch([one.span for one in rows], ids, [self._sampler_input] * len(ids))
        sampled = self._model.step(step).wait()
        return [sampled[end - 1] for end in accumulate(len(one.ids) for one in rows)]

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

    def _append(self, kv: SequenceKV, ids: Sequence[int]) -> Generator[StepRows, Sampled, Sampled]:
        """Compute the rows of `ids`, which follow `kv`, and return the most likely next token. Raises OutOfBlocks."""
        if len(ids) > MOST_DRAFTED:
            span = self._store.open(kv, len(ids) - 1)
            with self._store.abort_on_error([span]):
                run_to_end(self._model.chunks(PromptBatch([span], ids[:-1], outputs=1)))
                self._store.commit(span)
            self._stored += ids[:-1]
            ids = ids[-1:]
        sampled: Sampled = -1
        while ids:
            room = min(len(ids), self._store.rows_of_block(kv))
            now = ids[: max(rows for rows in (1, *DRAFT_ROWS) if rows <= room)]  # those that have kernels
            span = self._store.open_step(kv, len(now))
            with self._store.abort_on_error([span]):
                sampled = yield StepRows(span, now)
                self._store.commit(span)
            self._stored += now
            ids = ids[len(now) :]
        return sampled
