"""Prefills: a long prompt is computed in chunks, between which other requests take steps; shorter ones in one batch.

A batch has the prompts that wait, oldest first, as many as it has rows for, and a step of the requests that run. It is
for prompts that are computed for the first time and that no one reads. The CPU, several GPUs, and models with
recurrent layers compute prompts one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.prompt_readers import forward_and_read
from polarlm.engine.requests.batches import Batch, Batches, Rows, UnitTimer
from polarlm.engine.requests.matching import Matcher
from polarlm.engine.requests.request import Prefill, Request
from polarlm.engine.requests.scheduler import GAP, Scheduler
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.requantize.blocks import Requantizer


class Prefills:
    """The prefills of a `Runner`, whose caller holds the engine's lock."""

    def __init__(
        self,
        model: Transformer,
        scheduler: Scheduler,
        batches: Batches,
        matcher: Matcher,
        requantizer: Requantizer,
        timer: UnitTimer,
        release: Callable[[Request], None],
    ) -> None:
        """release: releases what a request holds."""
        self._model, self._store, self._scheduler, self._batches = model, model.store, scheduler, batches
        self._matcher, self._requantizer, self._timer, self._release = matcher, requantizer, timer, release

    def compute(self, requests: Sequence[Request], running: Sequence[Request]) -> Batch | None:
        """Compute a chunk of the first request's prompt, or its prompt with those of others and a step of the running
        requests. Return the batch whose prompts are complete; None if there is none yet."""
        request = requests[0]
        self._timer.add(request)
        try:
            missing = self._matcher.missing(request)
            if missing is None:
                return None
            if self._joins(request, missing):
                return self._together([request, *self._others(request, requests[1:])], running)
            is_turn = self._matcher.fits_in_a_step(request) and not request.sequence.generated
            if request.prefill is None and missing > 0 and not is_turn:
                request.prefill = self._begin(request)
        except OutOfBlocks:
            self._requeue(request)
            return None
        self._scheduler.admit(request.sequence)
        if request.prefill is not None:
            return self._advance(request, request.prefill)
        self._scheduler.prefilled(request.sequence, missing)
        return None

    def _requeue(self, request: Request) -> None:
        """Let a request wait for room; finish or fail it if there never will be any."""
        self._release(request)
        if self._scheduler.requeue(request.sequence):
            return
        if request.reads_prompt and not request.sequence.generated:
            request.fail(EngineError("The KV store has no room for this prompt: shorten it", "out_of_memory"))
        else:
            request.finish("length")

    # -- prompts together --------------------------------------------------------------------------------------

    @property
    def _most_rows(self) -> int:
        """The most rows of prompts; with running requests, as many as the fastest of recent batches of many rows had in
        `GAP`."""
        if not self._scheduler.running:
            return self._model.pass_rows
        return int(min(self._model.pass_rows // 2, max(self._batches.rates) * GAP))

    def _joins(self, request: Request, missing: int) -> bool:
        """Whether a matched prompt, which lacks `missing` tokens, is computed with others."""
        assert request.kv is not None
        is_first = request.prefill is None and request.sequence.generated == 0 and request.kv.length == request.cached
        if not is_first or request.reads_prompt or missing < 1 or request.kv.length < request.sequence.text_from:
            return False
        return self._rows(request) <= self._most_rows and not self._matcher.fits_in_a_step(request)

    def _rows(self, request: Request) -> int:
        """The rows of a prompt, filled up to whole blocks, as in its buffer."""
        assert request.kv is not None
        first, n = self._store.first_of_block(request.kv), self._store.shape.block_size
        return -(-(len(request.sequence.prompt) - first) // n) * n

    def _others(self, first: Request, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests whose prompts, matched now, are computed with the prompt of `first`."""
        chosen, rows = list[Request](), self._rows(first)
        for request in waiting:
            if request.kv is not None or request.saved is not None or request.hit is not None:
                break
            try:
                missing = self._matcher.missing(request)
            except OutOfBlocks:
                break
            if missing is not None and self._joins(request, missing):
                rows += self._rows(request)
                if rows <= self._most_rows and not self._requantizer.must_wait(rows):
                    chosen.append(request)
                    continue
            self._matcher.unmatch(request)
            break
        return chosen

    def _together(self, requests: Sequence[Request], running: Sequence[Request]) -> Batch | None:
        """Compute the prompts of these requests as far as there is room, others of them wait; and a step of the running
        ones, if there is room for all. Raises OutOfBlocks if there is no room for the first request, and DeviceLost."""
        opened: list[Request] = []
        try:
            batch = self._batches.open_prompts(requests, running)
            opened = [rows.request for rows in batch.prompts]
        finally:
            for request in requests[max(1, len(opened)) :]:
                self._matcher.unmatch(request)
        try:
            self._batches.compute(batch)
            self._batches.commit(batch)
            return batch
        except Exception:
            self._model.ops.check()
            if len(batch.rows) == 1:
                raise
        for request in opened:  # one by one: what fails a request harms nobody else
            if not request.sequence.finished:
                self._compute_alone(request)
        return None

    def _compute_alone(self, request: Request) -> None:
        try:
            batch = self._batches.open_prompts([request])
            self._batches.compute(batch)
            self._batches.finish(batch)
        except OutOfBlocks:
            self._matcher.unmatch(request)
        except Exception as error:
            self._model.ops.check()
            request.fail(error)

    # -- chunks ------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> Prefill:
        """Open the request's next span and return its prefill. Raises OutOfBlocks."""
        assert request.kv is not None
        start = request.kv.length
        stop = request.span_end(start, self._store.shape.block_size)
        is_first = start == request.cached and self._matcher.fits_in_a_step(request)
        as_steps = start >= len(request.sequence.prompt) or is_first
        span = self._store.open(request.kv, stop - start, as_steps=as_steps)
        ids = request.sequence.ids[start:stop]
        reader = request.reader()
        if reader is not None:
            return Prefill(span, forward_and_read(self._model, span, ids, reader), reader)
        return Prefill(span, self._model.forward_units([span], ids, outputs=1, images=request.images))

    def _advance(self, request: Request, prefill: Prefill) -> Batch | None:
        """Compute one chunk of a prompt. After the last one, return it as a batch if a token follows it."""
        layers, span = len(self._model.config.layers), prefill.span
        try:
            prefill.rows += next(prefill.units)
            request.report_progress((request.cached or 0) + prefill.rows // layers)
            if prefill.rows == span.count * layers:
                next(prefill.units)  # returns the hidden states, as StopIteration's value
            if self._model.ops.fetch_later is not None:
                self._timer.launched.append(request)
            return None
        except StopIteration as end:
            hidden = end.value
        ids, stop = request.sequence.ids, span.start + span.count
        rows = Rows(request, span, ids[span.start : stop], is_prompt=True, is_known=request.sequence.generated > 0)
        batch = Batch([rows])
        self._batches.sample(batch, hidden)
        self._batches.commit(batch)
        if prefill.reader is not None and not batch.damaged:
            request.outbox.append(prefill.reader.chunk())
        return None if rows.is_known else batch
