"""Runs the requests of an encoder: several texts at a time, whose rows go through the products together."""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.limits import RANK
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.model.prompt_readers import PairRelevance
from polarlm.engine.requests.prompts import second_of
from polarlm.engine.requests.request import Request
from polarlm.engine.requests.runner import Runner
from polarlm.engine.requests.scheduler import Unit

_ROWS = 1024  # tokens in a unit of work, unless one text has more


class EncoderRunner(Runner):
    """Holds all queued requests and runs their units of work. The caller holds the engine's lock."""

    _model: Encoder

    def run_unit(self) -> None:
        """Give the texts of the oldest requests their vectors. An error of one text fails its request alone."""
        batch = self._oldest()
        if not batch:
            return
        with self._working(Unit(True, tuple(request.sequence for request in batch))):
            self._timer.add(*batch)
            self._encode(batch)

    def _encode(self, batch: Sequence[Request]) -> None:
        texts, first, seconds = [request.sequence.prompt for request in batch], 0, None
        if self._model.config.scores_pairs and self._model.config.token_types > 1:
            seconds = [second_of(request.sequence.prompt, request.tokenizer) for request in batch]
        states = self._model.encode(texts, seconds)
        for request in batch:
            rows = states[first : first + len(request.sequence.prompt)]
            first += len(rows)
            request.clock.lap()
            try:
                reader = PairRelevance() if request.options.pooling == RANK else request.reader()
                assert reader is not None
                reader.read(self._model, rows, 0)
                request.outbox.append(reader.chunk())
                request.finish("length")
            except Exception as error:
                request.fail(error)

    def _oldest(self) -> list[Request]:
        """Return the first requests that together have at most _ROWS rows, at least one; those in the background are
        the last."""
        batch: list[Request] = []
        rows = 0
        for request in sorted(self.requests.values(), key=lambda request: request.sequence.in_background):
            rows += len(request.sequence.prompt)
            if batch and rows > _ROWS:
                break
            batch.append(request)
        return batch
