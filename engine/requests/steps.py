"""Steps of all running requests: their rows are computed, their tokens taken, and the accepted rows kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.requests.drafts import Batch, StepSeconds
from polarlm.engine.requests.request import Request
from polarlm.engine.requests.scheduler import Scheduler
from polarlm.engine.sampling.sample import NEWEST, Fetch, Sampled, SamplerInput
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import Span


@dataclass(frozen=True)
class _Step:
    """A step that has begun.

    requests: in row order. spans: the rows of each request that still takes part. fetch: the tokens; None while
    `logits` wait for sampler inputs. known: requests whose next token is known, so that none is taken. drafted: the
    drafted tokens of requests that have any. sampled: the tokens after their newest token and after each drafted one.
    """

    requests: Sequence[Request]
    spans: dict[Request, Span]
    fetch: Fetch | None
    known: Collection[Request] = ()
    logits: Any = None
    drafted: Mapping[Request, Sequence[int]] = field(default_factory=dict)
    sampled: Mapping[Request, Sequence[Sampled]] = field(default_factory=dict)


class Steps:
    """The steps of a `Runner`, whose caller holds the engine's lock."""

    def __init__(
        self,
        model: Transformer,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        preempt: Callable[[], bool],
        arrived: Callable[[], float],
        seconds: StepSeconds,
    ) -> None:
        """preempt: preempts the youngest request; False if only one computes. arrived: called when the tokens of a step
        arrive; returns when the step began. seconds: times of steps with requests that may draft."""
        self._model, self._store, self._prefixes = model, model.store, prefixes
        self._scheduler, self._preempt, self._arrived, self._seconds = scheduler, preempt, arrived, seconds
        self._begun: _Step | None = None  # the step after the last one whose tokens were taken

    @property
    def has_begun(self) -> bool:
        """Whether the next step has begun already."""
        return self._begun is not None

    def leave(self, request: Request) -> None:
        """Abort the request's rows in the step that has begun: they come after its final token."""
        if self._begun is not None and request in self._begun.spans:
            self._store.abort(self._begun.spans.pop(request))
            self._begun = self._begun if self._begun.spans else None

    def run(self, requests: Sequence[Request]) -> None:
        """Run a step: compute the row of each request's newest token, oldest request first, and take the next token,
        with drafted tokens that are right.

        If every request allows it, the following step, which is the next unit of work, begins first, so that the device
        computes it while tokens are taken and constraints compute their masks.
        """
        step, self._begun = self._begun or self._begin(requests), None
        if step is None:
            return
        with self._store.aborting(step.spans.values()):
            fetch, known = (step.fetch, step.known) if step.fetch is not None else self._sampler_input(step)
            kept = [self._take_verified(step, request) for request in step.spans] if step.drafted else None
            growing = [request for request, span in step.spans.items() if span.growth]
            damaged = self._store.commit_steps(list(step.spans.values()), kept)
        errors = {request: damaged[number] for number, request in enumerate(step.spans) if number in damaged}
        for request in growing:
            self._prefixes.insert(step.spans[request].sequence, request.sequence.ids)
        for request in [request for request in step.spans if request.wants_progress]:
            request.report_progress(len(request.sequence.prompt))
        try:
            self._begun = self._begin_next(step, fetch, known)
        finally:  # an error in the next step must not lose the tokens of this one
            tokens, started = fetch.wait(), self._arrived()
            for request, token in zip(step.requests, tokens, strict=True):
                result = errors.get(request, token) if errors else token
                if request in step.drafted:
                    request.damage(errors.get(request))
                elif request in step.spans and (request not in known or isinstance(result, EngineError)):
                    request.take(result)
        if [request for request in step.requests if request.drafts is not None]:
            rows = sum(span.count for span in step.spans.values())
            self._seconds.record(rows, time.perf_counter() - started)

    @staticmethod
    def _take_verified(step: _Step, request: Request) -> int | None:
        """Take a request's verified tokens; return how many of its rows are kept, None for all, without a draft."""
        drafted = step.drafted.get(request)
        if drafted is None:
            return None
        return step.spans[request].count - len(drafted) + request.take_verified(drafted, step.sampled[request])

    def _begin(self, requests: Sequence[Request]) -> _Step | None:
        """Begin a step of `requests`, except those that fail or are preempted for it. Returns None if none is left."""
        spans: dict[Request, Span] = {}
        ids: list[int] = []
        sampler_inputs: list[SamplerInput] = []
        ends: list[int] = []  # the end of each span, in rows of the step
        known: set[Request] = set()
        drafted: dict[Request, Sequence[int]] = {}
        batch = Batch(len(requests))
        with self._store.aborting(spans.values()):
            for request in requests:
                try:
                    guesses = () if request.drafts is None else self._draft(request, batch)
                except Exception as error:  # the other requests of the step continue
                    self._model.ops.check()
                    request.fail(error)
                    continue
                span = self._open(request, len(guesses))
                if span is None:
                    continue
                spans[request] = span
                stop, present = span.start + span.count, len(request.sequence.ids)
                if stop < present:
                    known.add(request)
                try:
                    last = request.sampler.none if request in known else request.sampler.next()
                except Exception as error:  # raised by the request's constraint
                    self._store.abort(spans.pop(request))
                    request.fail(error)
                    continue
                ids += request.sequence.ids[span.start : stop]
                sampler_inputs += [*[request.sampler.none] * (min(stop, present) - span.start - 1), last]
                if stop > present:
                    drafted[request] = guesses
                    ids += guesses
                    sampler_inputs += [request.sampler.next(guesses[:count]) for count in range(1, len(guesses) + 1)]
                ends.append(len(ids))
            if not spans:
                return None
            may_wait = len(ids) == len(spans) and all(request.begins_ahead for request in spans)
            if may_wait and self._model.ops.fetch_later is not None and self._model.mtp is None:
                return _Step([*spans], spans, self._model.step_ahead(list(spans.values()), ids, sampler_inputs), known)
            rows = self._model.step(list(spans.values()), ids, sampler_inputs)
            self._arrived()
            rows_of = {one: rows[end - spans[one].count : end] for one, end in zip(spans, ends, strict=True)}
            tokens = [next((row for row in one if isinstance(row, EngineError)), one[-1]) for one in rows_of.values()]
            sampled = {request: rows_of[request][-1 - len(guesses) :] for request, guesses in drafted.items()}
            return _Step([*spans], spans, Fetch(None, lambda: tokens), known, drafted=drafted, sampled=sampled)

    def _draft(self, request: Request, batch: Batch) -> Sequence[int]:
        """Return drafted tokens to verify after the newest one, at most as many as fit into the current block."""
        if request.kv is None:  # it was preempted for this step
            return ()
        missing = len(request.sequence.ids) - request.kv.length
        return request.draft(self._store.rows_of_block(request.kv) - missing + 1, batch)

    def _sampler_input(self, step: _Step) -> tuple[Fetch, Collection[Request]]:
        """Begin to sample the tokens of a step whose rows have begun. Returns their fetch and the step's `known`."""
        sampler_inputs: list[SamplerInput] = []
        known: set[Request] = set()
        for request in step.requests:
            sampler_input = request.sampler.none
            if request in step.spans and len(request.sequence.ids) > step.spans[request].start + 1:
                known.add(request)
            elif request in step.spans:
                try:
                    sampler_input = request.sampler.next()
                except Exception as error:  # raised by the request's constraint
                    self._store.abort(step.spans.pop(request))
                    request.fail(error)
            sampler_inputs.append(sampler_input)
        return self._model.sample_ahead(step.logits, sampler_inputs), known

    def _begin_next(self, step: _Step, fetch: Fetch, known: Collection[Request]) -> _Step | None:
        """Begin the step after `step`, whose tokens are not known yet; None if it has to wait for them."""
        requests = step.requests
        if fetch.ids is None or known or self._scheduler.prefill_follows:
            return None
        if [one for one in requests if not one.expects_more or (one.drafts is not None and one.may_draft)]:
            return None  # requests that have left the step expect nothing
        spans: dict[Request, Span] = {}
        with suppress(OutOfBlocks), self._store.aborting(spans.values()):  # `_begin` will preempt a request for it
            for request in requests:
                assert request.kv is not None
                spans[request] = self._store.open_step(request.kv)
            if [one for one in requests if not (one.begins_ahead and one.sampler.reach_ahead)]:
                return _Step(requests, spans, None, logits=self._model.rows_ahead(list(spans.values()), fetch))
            sampler_inputs = [request.sampler.next((NEWEST,)) for request in requests]
            return _Step(requests, spans, self._model.step_ahead(list(spans.values()), fetch, sampler_inputs))
        return None

    def _open(self, request: Request, drafted: int) -> Span | None:
        """Open a span of the tokens that have no K/V yet, the newest one last, and of `drafted` ones after it; None if
        the request was preempted, or finished because it runs alone and there is no room.

        The span ends with the current block at the latest, so that each token attends to the codes that it would attend
        to in a step of its own. Younger requests may be preempted for it; drafted tokens that need another block are
        left out.
        """
        while request.kv is not None:
            missing = len(request.sequence.ids) - request.kv.length
            try:
                return self._store.open_step(request.kv, min(missing + drafted, self._store.rows_of_block(request.kv)))
            except OutOfBlocks:
                if drafted:
                    drafted = 0
                elif not self._preempt():
                    request.finish("length")
                    return None
        return None
