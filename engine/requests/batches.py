"""Batches: rows of prompts and of requests that run, which are computed together, and what becomes of their tokens.

open → run: compute the rows, commit them, begin the next step, take the tokens. A step is a batch without prompts. The
chunks of a long prompt, which is a batch by itself, and those of prompts on a CPU are computed one by one, and other
requests take steps between them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from polarlm.engine.errors import EngineError
from polarlm.engine.model.batch import PromptBatch, StepBatch, join
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.prompt_readers import PromptReader, read_chunks
from polarlm.engine.requests.drafters.drafter import DraftTask, draft_together
from polarlm.engine.requests.drafts import StepPlan, StepSeconds
from polarlm.engine.requests.request import Request, UnitTimer
from polarlm.engine.requests.scheduler import Scheduler
from polarlm.engine.sampling.sample import NEWEST, Fetch, Sampled, SamplerInput
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import Span
from polarlm.engine.storage.tiers.patience import Patience

_RECENT = 4  # batches with prompts
_FEW_ROWS = 8  # a batch of fewer than an eighth of the most rows takes as long as reading the weights


@dataclass(eq=False)
class RequestRows:
    """The rows of a request in a batch.

    span: where they go; None once the request has left. ids: their tokens, the last of which may be `guesses`, drafted.
    is_known: whether the token after them is there already, so that none is taken.
    """

    request: Request
    span: Span | None
    ids: Sequence[int]
    guesses: Sequence[int] = ()
    is_prompt: bool = False
    is_known: bool = False

    @property
    def outputs(self) -> int:
        """How many of the rows have a token sampled: of a prompt, the last one."""
        return 1 if self.is_prompt else len(self.ids)


@dataclass(eq=False)
class Batch:
    """Rows that are computed together: those of prompts, then those of requests that run, oldest first.

    chunks: computes the prompts, see `Transformer.chunks`. reader: of a long prompt's hidden states.
    done: rows computed so far, summed over layers; 0 if all are computed at once. fetch: the tokens; None before the
    rows are computed.
    """

    rows: list[RequestRows] = field(default_factory=list)
    chunks: Generator[int, None, Any] | None = None
    reader: PromptReader | None = None
    done: int = 0
    fetch: Fetch | None = None
    began: float = field(default_factory=time.perf_counter)
    damaged: dict[Request, EngineError] = field(default_factory=dict)  # by request: what `KVStore.commit_steps` says

    @property
    def active(self) -> list[RequestRows]:
        """The rows of requests that have not left."""
        return [rows for rows in self.rows if rows.span is not None]

    @property
    def prompts(self) -> list[RequestRows]:
        return [rows for rows in self.rows if rows.is_prompt]

    @property
    def count(self) -> int:
        return sum(len(rows.ids) for rows in self.rows)


class Batches:
    """The batches of a `Runner`, whose caller holds the engine's lock."""

    def __init__(
        self,
        model: Transformer,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        patience: Patience,
        timer: UnitTimer,
        preempt: Callable[[], bool],
        seconds: StepSeconds,
    ) -> None:
        """preempt: preempts the youngest request; False if only one computes. seconds: times of steps with requests
        that may draft."""
        self._model, self._store, self._prefixes, self._patience = model, model.store, prefixes, patience
        self._scheduler, self._timer, self._preempt, self._seconds = scheduler, timer, preempt, seconds
        self.next_step: Batch | None = None  # which has begun while the tokens of the last one were taken
        self.prefill: Batch | None = None  # whose last chunk is not computed yet
        self.rates = deque([math.inf], _RECENT)  # rows per second of the latest batches of many rows with prompts
        self.few_rows = model.ops.batch_rows // _FEW_ROWS

    def leave(self, request: Request) -> None:
        """Abort a request's rows: of its prompt, and in the step that has begun, which come after its final token."""
        self.next_step, self.prefill = self._drop_rows(self.next_step, request), self._drop_rows(self.prefill, request)
        if self.prefill is not None:
            self._scheduler.admit(self.prefill.active[0].request.sequence)  # which may be preempted now

    def abort_next(self) -> None:
        """Abort the rows of the step that has begun, which are computed again."""
        for span in [] if self.next_step is None else _spans(self.next_step.rows):
            self._store.abort(span)
        self.next_step = None

    def _drop_rows(self, batch: Batch | None, request: Request) -> Batch | None:
        """Abort a request's rows in a batch, and return it; None if no other has rows in it."""
        for rows in [] if batch is None else batch.active:
            if rows.request is request and rows.span is not None:
                self._store.abort(rows.span)
                rows.span = None
        return batch if batch is not None and batch.active else None

    def unmatch(self, request: Request) -> None:
        """Let a request whose prefix is matched wait with nothing in the store."""
        if request.kv is not None:
            self._prefixes.release(request.kv, request.sequence.ids)
            request.kv = None

    def _abort_on_error(self, batch: Batch) -> AbstractContextManager[None]:
        return self._store.abort_on_error(rows.span for rows in batch.rows if rows.span is not None)

    # -- open --------------------------------------------------------------------------------------------------

    def open_step(self, requests: Sequence[Request]) -> Batch | None:
        """Open a row for the newest token of each request, oldest first, and for drafted tokens after it. Some requests
        may fail or be preempted for it; None if none is left."""
        batch, is_alone = Batch(), len(requests) == 1
        guessed: dict[Request, Sequence[int]] = dict.fromkeys(requests, ())
        if [one for one in requests if one.drafts is not None]:
            guessed = self._draft(requests)
        with self._abort_on_error(batch):
            for request, guesses in guessed.items():
                span = self._open(request, len(guesses), is_alone=is_alone)
                if span is not None:
                    batch.rows.append(_rows(request, span, guesses))
        return batch if batch.rows else None

    def _open(self, request: Request, drafted: int, *, is_alone: bool) -> Span | None:
        """Open a span of the tokens that have no K/V yet, the newest one last, and of `drafted` ones after it; None if
        the request was preempted, or finished because it runs alone and there is no room.

        The span ends with the current block at the latest, so that each token attends to the codes that it would attend
        to in a step of its own. Younger requests may be preempted for it; drafted tokens that need another block are
        left out.
        """
        while request.kv is not None:
            count = len(request.sequence.ids) - request.kv.length + drafted
            if count > 1:
                most = self._model.known_rows(request.kv) if is_alone else self._store.rows_of_block(request.kv)
                count = min(count, most)
            try:
                return self._store.open_step(request.kv, count)
            except OutOfBlocks:
                if drafted:
                    drafted = 0
                elif not self._preempt():
                    request.finish("length")
                    return None
        return None

    # -- run ---------------------------------------------------------------------------------------------------

    def run(self, batch: Batch) -> None:
        """Compute an open batch, or a chunk of a long prompt, commit its rows, and take its tokens.

        If every request of a step allows it, the following step, which is the next unit of work, begins before, so that
        the device computes it while tokens are taken and constraints compute their masks. If several prompts fail, or
        one with a step, they are computed one by one: what fails a request harms nobody else.
        """
        try:
            self._compute(batch)
            if batch.fetch is None:  # chunks are left
                self.prefill = batch
                self._scheduler.admit(batch.active[0].request.sequence)
                return
            self._commit(batch)
        except BaseException as error:
            for span in _spans(batch.rows):
                self._store.abort(span)
            if not isinstance(error, Exception) or batch.chunks is None or len(batch.rows) == 1:
                raise
            self._model.ops.check()
            self.prefill = None
            self._run_one_by_one([rows.request for rows in batch.active if rows.is_prompt])
            return
        if batch.rows[0].is_prompt and batch.rows[0].is_known:
            return  # a prompt that is computed again: the token after it was taken before
        try:
            self.next_step = self._begin_next(batch, batch.fetch)
        finally:  # an error in the next step must not lose the tokens of this one
            self._take(batch, batch.fetch)

    def _compute(self, batch: Batch) -> None:
        """Compute the rows of a batch, or the next chunk of prompts, and begin to sample the tokens after them, unless
        chunks are left. Of a step that has begun, tokens may be left to sample."""
        if batch.chunks is not None:
            self._advance(batch, batch.chunks)
        elif batch.fetch is None:
            rows, ids = batch.rows, [*chain.from_iterable(one.ids for one in batch.rows)]
            has_one_each = len(ids) == len(rows)
            known = () if has_one_each else [one.outputs - len(one.guesses) - 1 for one in rows]
            ahead = has_one_each and all(one.request.begins_ahead for one in rows)
            batch.fetch = self._model.step(StepBatch(_spans(rows), ids, self._sampler_inputs(batch), known), ahead)
        elif batch.fetch.logits is not None:
            for one in batch.active:
                assert one.span is not None
                one.is_known = len(one.request.sequence.ids) > one.span.start + 1
            batch.fetch = self._model.sample(batch.fetch.logits, self._sampler_inputs(batch))

    def _sampler_inputs(self, batch: Batch) -> list[SamplerInput]:
        """The sampler inputs of all rows with outputs. A request whose constraint raises fails."""
        inputs = list[SamplerInput]()
        for rows in batch.rows:
            request, sampler = rows.request, rows.request.sampler
            first, last = rows.outputs - len(rows.guesses) - 1, [sampler.none]
            if rows.span is not None and not rows.is_known and _expects_token(request):
                try:
                    last = [sampler.next(rows.guesses[:count]) for count in range(len(rows.guesses) + 1)]
                except Exception as error:  # raised by the request's constraint
                    request.fail(error)
                    last *= len(rows.guesses) + 1
            inputs += [*[sampler.none] * first, *last]
        return inputs

    def _commit(self, batch: Batch) -> None:
        """Keep the rows of a computed batch, of drafted tokens those that are right, which are taken here."""
        active = batch.active
        kept_rows = self._take_verified(batch) if [rows for rows in active if rows.guesses] else None
        growing = [rows for rows in active if rows.span is not None and rows.span.reservations]
        errors = self._store.commit_steps(_spans(active), kept_rows)
        batch.damaged = {rows.request: errors[number] for number, rows in enumerate(active) if number in errors}
        for rows in growing:
            if rows.span is not None and rows.request.options.pooling is None:
                self._prefixes.insert(rows.span.sequence, rows.request.sequence.ids)
        if not batch.done:  # chunks are reported each
            for request, span in [(rows.request, rows.span) for rows in active if rows.request.wants_progress]:
                stored = 0 if span is None else span.start + span.count
                request.report_progress(min(stored, len(request.sequence.prompt)))
        for request in [rows.request for rows in active if rows.is_prompt]:
            if request.kv is not None and request.kv.length == request.sequence.computable:
                self._scheduler.end_prefill(request.sequence)
        if batch.chunks is not None:
            self.prefill = None
        if batch.reader is not None:
            batch.rows[0].request.outbox.append(batch.reader.chunk())

    def _draft(self, requests: Sequence[Request]) -> dict[Request, Sequence[int]]:
        """Return drafted tokens to verify after the newest one of each request, at most as many as fit into its current
        block. Requests fail whose drafter raises."""
        plan, drafted, tasks = StepPlan(len(requests)), dict[Request, Sequence[int]](), dict[Request, DraftTask]()
        for request in requests:
            drafted[request], kv, sequence = (), request.kv, request.sequence
            if request.drafts is not None and kv is not None:
                missing, left = len(sequence.ids) - kv.length, sequence.max_tokens - sequence.generated
                room = min(self._store.rows_of_block(kv) - missing + 1, left) - 1  # the final token needs no row
                task = request.drafts.task(sequence.ids, room, plan)
                if task is not None:
                    tasks[request] = task
        for request, result in draft_together(tasks).items():
            if isinstance(result, Exception):  # the other requests of the step continue
                self._model.ops.check()
                request.fail(result)
                del drafted[request]
            elif request.drafts is not None:
                drafted[request] = request.drafts.cut(result)
        return drafted

    def _take_verified(self, batch: Batch) -> list[int | None]:
        """Take drafted tokens that are right, and the one after them. Return how many rows of each request are kept;
        None for all, without a draft."""
        assert batch.fetch is not None
        kept_rows = list[int | None]()
        for rows, sampled in zip(batch.rows, _by_rows(batch, batch.fetch.wait()), strict=True):
            drafted = len(rows.guesses)
            right = rows.request.take_verified(rows.guesses, sampled[-1 - drafted :]) if drafted else 0
            kept_rows.append(len(rows.ids) - drafted + right if drafted else None)
        return kept_rows

    def _begin_next(self, batch: Batch, fetch: Fetch) -> Batch | None:
        """Begin the step after a step, whose tokens are not known yet; None if it has to wait for them."""
        requests = [rows.request for rows in batch.rows]
        if fetch.ids is None or self._scheduler.prefill_follows or any(rows.is_known for rows in batch.rows):
            return None
        if [one for one in requests if not one.expects_more or (one.drafts and one.drafts.is_ready(one.sequence.ids))]:
            return None  # requests that have left the step expect nothing
        step = Batch()
        with suppress(OutOfBlocks), self._abort_on_error(step):  # `open_step` will preempt a request for it
            for request in requests:
                assert request.kv is not None
                step.rows += (RequestRows(request, self._store.open_step(request.kv), (NEWEST,)),)
            waits = [one for one in requests if not (one.begins_ahead and one.sampler.reach_ahead)]
            samplers = None if waits else [request.sampler.next((NEWEST,)) for request in requests]
            step.fetch = self._model.step(StepBatch(_spans(step.rows), fetch, samplers), True)
            return step
        return None

    def _take(self, batch: Batch, fetch: Fetch) -> None:
        tokens, prompts, damaged = _last_tokens(batch, fetch.wait()), batch.prompts, batch.damaged
        began = self._timer.tokens_arrived([rows.request for rows in prompts])
        if prompts:
            self._patience.record_prefill(sum(len(rows.ids) for rows in prompts), prompts[0].request.clock.prefill)
        for rows, token in zip(batch.rows, tokens, strict=True):
            request = rows.request
            token = damaged.get(request, token) if damaged else token
            if rows.guesses:
                request.damage(damaged.get(request))
            elif rows.span is None or request.sequence.finish_reason is not None:
                continue
            elif rows.is_known or request.sequence.max_tokens == 0:
                if isinstance(token, EngineError):
                    request.take(token)
                elif not rows.is_known:
                    request.finish("length")
            else:
                request.take(token)
        seconds = time.perf_counter() - (batch.began if prompts else began)
        if prompts and len(prompts) < len(batch.rows):
            self._scheduler.take_step()
        if not prompts and [rows for rows in batch.rows if rows.request.drafts is not None]:
            self._seconds.record(batch.count, seconds)
        elif prompts and not batch.done and batch.count >= self.few_rows:
            self.rates.append(batch.count / seconds)

    # -- prompts -----------------------------------------------------------------------------------------------

    def open_prompts(self, requests: Sequence[Request], running: Sequence[Request] = ()) -> Batch:
        """Open rows for the prompts of the first requests as their plans say, and for a step of the running ones,
        without drafts, if there is room for all. Raises OutOfBlocks if there is no room for the first request, and
        MemoryError if there is no memory for its buffers."""
        batch = Batch()
        try:
            spans = self._open_spans(requests)
            batch.rows += [_rows(one, span, is_prompt=True) for one, span in zip(requests, spans, strict=False)]
        finally:
            for request in requests[max(1, len(batch.rows)) :]:
                self.unmatch(request)
        if running:
            with self._abort_on_error(batch):
                batch.rows += self._open_running(running)
        self._timer.add(*(rows.request for rows in batch.rows[1:]))
        batch.reader = requests[0].reader()
        batch.chunks = self._chunks(batch)
        return batch

    def _open_running(self, requests: Sequence[Request]) -> list[RequestRows]:
        """Return open rows of running requests, without drafts; none if there is no room for all."""
        steps = list[RequestRows]()
        with suppress(OutOfBlocks), self._abort_on_error(Batch(steps)):
            for request in requests:
                assert request.kv is not None
                missing = len(request.sequence.ids) - request.kv.length
                span = self._store.open_step(request.kv, min(missing, self._store.rows_of_block(request.kv)))
                steps.append(_rows(request, span))
            return steps
        return []

    def _open_spans(self, requests: Sequence[Request]) -> list[Span]:
        """Return open spans of the first of these prompts that there is room for."""
        prompts = [(one.kv, one.plan.rows) for one in requests if one.kv is not None]
        while True:
            try:
                return self._store.open_batch(prompts, as_steps=requests[0].plan.as_steps)
            except MemoryError:
                if len(prompts) == 1:
                    raise
                prompts = prompts[: len(prompts) // 2]

    def _chunks(self, batch: Batch) -> Generator[int, None, Any]:
        prompts, steps = batch.prompts, [rows for rows in batch.rows if not rows.is_prompt]
        spans, (first, *_) = _spans(prompts), prompts
        if first.request.plan.how == "join":
            ids = [*chain.from_iterable(rows.ids for rows in steps)]
            return self._model.chunks(join(self._model.ops, spans, [one.ids for one in prompts], _spans(steps), ids))
        alone = PromptBatch(spans, first.ids, None if batch.reader else 1, images=first.request.images)
        return self._model.chunks(alone) if batch.reader is None else read_chunks(self._model, alone, batch.reader)

    def _advance(self, batch: Batch, chunks: Generator[int, None, Any]) -> None:
        """Compute one chunk of prompts; after the last one, begin to sample the tokens after them."""
        layers, count = len(self._model.config.layers), batch.count
        try:
            batch.done += next(chunks)
            for rows in batch.active:
                done = batch.done // layers * len(rows.ids) // count
                if rows.request.wants_progress:
                    rows.request.report_progress((rows.request.cached or 0) + done)
            if batch.done == count * layers:
                next(chunks)  # returns the hidden states, as StopIteration's value
            if self._model.ops.fetch_later is not None:
                self._timer.launched.append(batch.rows[0].request)
            return
        except StopIteration as end:
            hidden = end.value
        self._sample(batch, hidden)

    def _sample(self, batch: Batch, hidden: Any) -> None:
        """Begin to sample the tokens of a batch with prompts, from the hidden states (n, E) of their last rows and of
        all other rows."""
        inputs = self._sampler_inputs(batch)
        if [rows for rows in batch.rows if not rows.is_known and _expects_token(rows.request)]:
            batch.fetch = self._model.choose(hidden, inputs)
        else:
            batch.fetch = Fetch(None, lambda: [0] * len(inputs))

    def _run_one_by_one(self, requests: Sequence[Request]) -> None:
        for request in [one for one in requests if not one.sequence.finished]:
            try:
                batch = self.open_prompts([request])
                while batch.fetch is None:
                    self.run(batch)
            except OutOfBlocks:
                self.unmatch(request)
            except Exception as error:
                self._model.ops.check()
                request.fail(error)


def _rows(request: Request, span: Span, guesses: Sequence[int] = (), *, is_prompt: bool = False) -> RequestRows:
    """The rows of an open span; without `guesses` if there was no room for them."""
    ids, stop = request.sequence.ids, span.start + span.count
    present = ids[span.start : stop]
    guesses = guesses if stop > len(ids) else ()
    return RequestRows(request, span, [*present, *guesses], guesses, is_prompt, is_known=stop < len(ids))


def _spans(rows: Iterable[RequestRows]) -> list[Span]:
    return [one.span for one in rows if one.span is not None]


def _expects_token(request: Request) -> bool:
    return request.sequence.finish_reason is None and request.sequence.max_tokens > 0


def _last_tokens(batch: Batch, tokens: Sequence[Sampled]) -> Sequence[Sampled]:
    """Return the token after the last row of each request, or the error of one of its rows."""
    if len(tokens) == len(batch.rows):
        return tokens
    each = _by_rows(batch, tokens)
    return [next((one for one in sampled if isinstance(one, EngineError)), sampled[-1]) for sampled in each]


def _by_rows(batch: Batch, tokens: Sequence[Sampled]) -> list[list[Sampled]]:
    left = iter(tokens)
    return [[*islice(left, rows.outputs)] for rows in batch.rows]
