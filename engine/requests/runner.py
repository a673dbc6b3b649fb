"""Runs the scheduler's units: parts of prefills, and steps of all running requests. Preempts when blocks run out."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.kv.blocks import OutOfBlocks
from engine.kv.prefix import PrefixCache
from engine.kv.store import SequenceKV, Span
from engine.model.forward import Transformer
from engine.model.prompt_readers import forward_and_read
from engine.outputs import Status
from engine.requests.request import Prefill, Request
from engine.requests.scheduler import Scheduler, TokenSequence
from engine.sampling.sample import Draw, Fetch


@dataclass(frozen=True)
class StoredSequence:
    """A released sequence that the prefix cache can find."""

    ids: tuple[int, ...] = ()  # of its stored tokens
    bytes: int = 0
    salt: str = ""  # the cache salt that it is found with


@dataclass(frozen=True)
class _Step:
    """A step that has begun. requests: in the order of its rows. spans: of those that still wait for their token.

    fetch: the token of each request; None while `logits` wait for their draws, which wait for the last step's tokens.
    known: requests whose next token is known already, and whose rows are only computed.
    """

    requests: Sequence[Request]
    spans: dict[Request, Span]
    fetch: Fetch | None
    known: Collection[Request] = ()
    logits: Any = None


class Runner:
    """All queued and running requests, and the unit of work that comes next. The caller holds the engine's lock."""

    def __init__(self, model: Transformer, prefixes: PrefixCache, scheduler: Scheduler):
        self._model, self._store, self._prefixes = model, model.store, prefixes
        self._scheduler = scheduler
        self.requests: dict[TokenSequence, Request] = {}
        self.newest = StoredSequence()
        self._begun: _Step | None = None  # the step behind the last one whose tokens were taken

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.sequence] = request
        self._scheduler.submit(request.sequence)

    def run_unit(self) -> None:
        """Run the next unit of work, if there is one. An error fails the requests of the unit and no other."""
        unit = self._scheduler.schedule(in_step=self._begun is not None)
        if unit is None:
            return
        requests = [self.requests[sequence] for sequence in unit.sequences]
        started = time.perf_counter()
        for request in requests:
            request.clock.begin(unit.is_prefill)
        try:
            if unit.is_prefill:
                self._prefill(requests[0])
                if self._scheduler.running:
                    self._model.ops.wait()  # otherwise the device's time would be counted to the next step
            else:
                self._step_all(requests)
        except Exception as error:
            for request in self._affected(requests, unit.is_prefill):
                request.fail(error)
        except BaseException:  # Ctrl-C, maybe in a thread that waits for a request of another unit
            for request in self._affected(requests, unit.is_prefill):
                request.finish("cancelled")
            raise
        finally:
            self._scheduler.record_time(unit, time.perf_counter() - started)
            for request in requests:
                request.clock.lap()
            self.sweep()

    @staticmethod
    def _affected(requests: Sequence[Request], is_prefill: bool) -> list[Request]:
        """Requests that an error in this unit fails. Finished and preempted ones are unaffected."""
        return [r for r in requests if not r.sequence.finished and (is_prefill or r.kv is not None)]

    def status(self) -> Status:
        """Counts of requests, blocks and threads."""
        allocators = [group.quantized for group in self._store.groups]
        size = sum(blocks.size for blocks in allocators)
        free, kept = sum(blocks.free for blocks in allocators), sum(blocks.kept for blocks in allocators)
        running = self._scheduler.running
        return Status(
            running=running,
            waiting=len(self.requests) - running,
            blocks=size,
            blocks_used=size - free,
            blocks_kept=kept,
            blocks_free=free - kept,
            threads=self._model.ops.threads(),
        )

    def sweep(self) -> None:
        """Remove finished and cancelled requests. The prefix cache can still find their blocks."""
        for request in [request for request in self.requests.values() if request.sequence.finished]:
            self._scheduler.remove(request.sequence)
            del self.requests[request.sequence]
            self._release(request)

    def _release(self, request: Request) -> None:
        """Abort the request's spans and release its K/V to the prefix cache; discard them if they are damaged."""
        if self._begun is not None and request in self._begun.spans:
            self._store.abort(self._begun.spans.pop(request))  # its row is computed in vain, behind its last token
            self._begun = self._begun if self._begun.spans else None
        prefill, kv, request.prefill, request.kv = request.prefill, request.kv, None, None
        if prefill is not None:
            self._store.abort(prefill.span)
        if kv is None:
            return
        if request.damaged:
            self._prefixes.discard(kv)
        elif request.options.pooling is not None:  # texts to be embedded are no beginnings of conversations
            self._store.release(kv)
        else:
            self.release(request.sequence.ids, kv, request.options.cache_salt)

    def release(self, ids: Sequence[int], kv: SequenceKV, salt: str) -> None:
        """Release a sequence, whose tokens are the first of `ids`, to the prefix cache; it becomes the newest."""
        if kv.length:
            self.newest = StoredSequence(tuple(ids[: kv.length]), self._store.bytes_held(kv), salt)
        self._prefixes.release(kv, ids)

    # -- prefill -----------------------------------------------------------------------------------------------

    def _prefill(self, request: Request) -> None:
        """Run one unit of a prefill, or requeue the request if there is no room for it."""
        try:
            if request.kv is None:
                request.kv = self._match_prefix(request)
                request.record_prefix_hit(request.kv.length)
            if request.prefill is None and request.kv.length < request.sequence.computable:
                request.prefill = self._begin(request)
        except OutOfBlocks:
            self._release(request)
            if self._scheduler.requeue(request.sequence):
                return
            if request.reads_prompt and not request.sequence.generated:
                request.fail(EngineError("The KV store has no room for this prompt: shorten it", "out_of_memory"))
            else:
                request.finish("length")
            return
        self._scheduler.admit(request.sequence)
        computable = request.sequence.computable  # tokens that come with the first one belong to steps
        if request.prefill is not None:
            self._advance(request, request.prefill)
        if request.prefill is None and request.kv.length == computable:
            self._scheduler.prefilled(request.sequence)

    def _match_prefix(self, request: Request) -> SequenceKV:
        """The longest stored prefix of a request's tokens from which it can go on. Raises OutOfBlocks."""
        options = request.options
        ids = request.sequence.ids[:-1] if options.cache_prompt and not request.reads_prompt else ()
        kv = self._prefixes.match_prefix(ids, options.cache_salt)
        if request.reproduces(kv.length):
            return kv
        self._prefixes.release(kv, ids)
        return self._prefixes.match_prefix(ids[: request.cached], options.cache_salt)

    def _begin(self, request: Request) -> Prefill:
        """Open the request's next span and return its prefill. Raises OutOfBlocks."""
        assert request.kv is not None
        start = request.kv.length
        stop = request.span_end(start, self._store.shape.block_size)
        span = self._store.open(request.kv, stop - start)
        ids = request.sequence.ids[start:stop]
        reader = request.reader()
        if reader is not None:
            return Prefill(span, forward_and_read(self._model, span, ids, reader), reader)
        return Prefill(span, self._model.forward_units([span], ids, outputs=1))

    def _advance(self, request: Request, prefill: Prefill) -> None:
        """Run one unit of a prefill. After the last unit, commit its span and take the first token."""
        layers = self._model.config.layers
        try:
            prefill.rows += next(prefill.units)
            request.report_progress(layers)
            if prefill.rows == prefill.span.count * layers:
                next(prefill.units)  # returns the hidden states, as StopIteration's value
        except StopIteration as end:
            self._store.commit(prefill.span)
            if request.options.pooling is None:
                self._prefixes.insert(prefill.span.sequence, request.sequence.ids)
            request.prefill = None
            if prefill.reader is not None:
                request.outbox.append(prefill.reader.chunk())
            if request.sequence.generated:
                return
            if request.sequence.max_tokens == 0:
                request.clock.lap()
                request.finish("length")
            else:
                (sampled,) = self._model.choose(end.value, [request.draw()])
                request.clock.lap()
                request.take(sampled)

    # -- steps -------------------------------------------------------------------------------------------------

    def _step_all(self, requests: Sequence[Request]) -> None:
        """Run a step: feed the newest token of each request, oldest request first, and take the next one.

        Where every request allows it, the step after that begins first, with the tokens as they are on the device, so
        that it is computed while these are taken, and the masks of constraints found. It is the next unit of work.
        """
        step, self._begun = self._begun or self._begin_step(requests), None
        if step is None:
            return
        try:
            fetch, known = (step.fetch, step.known) if step.fetch is not None else self._draw(step)
            damaged = self._store.commit_steps(list(step.spans.values()))
        except BaseException:
            for span in step.spans.values():
                self._store.abort(span)
            raise
        found = {request: damaged[number] for number, request in enumerate(step.spans) if number in damaged}
        for request, span in step.spans.items():
            self._prefixes.insert(span.sequence, request.sequence.ids)
        try:
            self._begun = self._begin_next(step, fetch, known)
        finally:  # an error in the next step takes no token of this one
            for request, token in zip(step.requests, fetch.wait(), strict=True):
                result = found.get(request, token)
                if request in step.spans and (request not in known or isinstance(result, EngineError)):
                    request.take(result)

    def _begin_step(self, requests: Sequence[Request]) -> _Step | None:
        """Begin a step of `requests`, except those that are preempted for it or fail; None if none is left."""
        spans: dict[Request, Span] = {}
        ids: list[int] = []
        draws: list[Draw] = []
        ends: list[int] = []  # rows before the end of each span
        known: set[Request] = set()
        try:
            for request in requests:
                span = self._open_step(request)
                if span is None:
                    continue
                spans[request] = span
                stop = span.start + span.count
                if stop < len(request.sequence.ids):
                    known.add(request)
                try:
                    last = request.no_draw if request in known else request.draw()
                except Exception as error:  # from the request's constraint
                    self._store.abort(spans.pop(request))
                    request.fail(error)
                    continue
                ids += request.sequence.ids[span.start : stop]
                draws += [*[request.no_draw] * (span.count - 1), last]
                ends.append(len(ids))
            if not spans:
                return None
            may_wait = len(ids) == len(spans) and all(request.begins_ahead for request in spans)
            if may_wait and self._model.ops.fetch_later is not None:
                return _Step([*spans], spans, self._model.step_ahead(list(spans.values()), ids, draws), known)
            rows = self._model.step(list(spans.values()), ids, draws)
            own = [rows[end - span.count : end] for end, span in zip(ends, spans.values(), strict=True)]
            tokens = [next((row for row in given if isinstance(row, EngineError)), given[-1]) for given in own]
            return _Step([*spans], spans, Fetch(None, lambda: tokens), known)
        except BaseException:
            for span in spans.values():
                self._store.abort(span)
            raise

    def _draw(self, step: _Step) -> tuple[Fetch, Collection[Request]]:
        """Draw the tokens of a step whose rows have begun, and return the requests whose next token is known."""
        draws: list[Draw] = []
        known: set[Request] = set()
        for request in step.requests:
            draw = request.no_draw
            if request in step.spans and len(request.sequence.ids) > step.spans[request].start + 1:
                known.add(request)
            elif request in step.spans:
                try:
                    draw = request.draw()
                except Exception as error:  # from the request's constraint
                    self._store.abort(step.spans.pop(request))
                    request.fail(error)
            draws.append(draw)
        return self._model.draw_ahead(step.logits, draws), known

    def _begin_next(self, step: _Step, fetch: Fetch, known: Collection[Request]) -> _Step | None:
        """Begin the step after `step`, whose tokens are not known yet; None where that has to wait for them."""
        requests = step.requests
        if fetch.ids is None or known or self._scheduler.has_prefill:
            return None
        if not all(request.expects_more for request in requests):  # as none that has left the step does
            return None
        spans: dict[Request, Span] = {}
        try:
            for request in requests:
                assert request.kv is not None
                spans[request] = self._store.open_step(request.kv)
            if not all(request.draws_ahead for request in requests):
                return _Step(requests, spans, None, logits=self._model.rows_ahead(list(spans.values()), fetch))
            draws = [request.draw(ahead=True) for request in requests]
            return _Step(requests, spans, self._model.step_ahead(list(spans.values()), fetch, draws))
        except BaseException as error:
            for span in spans.values():
                self._store.abort(span)
            if not isinstance(error, OutOfBlocks):  # then some request has to give up its blocks
                raise
            return None

    def _open_step(self, request: Request) -> Span | None:
        """A span of the newest token, for which younger requests may be preempted.

        With tokens before it that no step has computed: as many of all of them as go into a step and into the current
        block, so that each attends to the codes that it would attend to in a step of its own. None if the request was
        preempted itself, or finishes because it runs alone and there is no room.
        """
        while request.kv is not None:
            missing = len(request.sequence.ids) - request.kv.length
            try:
                return self._store.open_step(request.kv, min(missing, self._store.rows_of_block(request.kv)))
            except OutOfBlocks:
                youngest = self._scheduler.preempt()
                if youngest is None:
                    request.finish("length")
                    return None
                self._release(self.requests[youngest])
        return None
