"""Prefills: a long prompt is computed in units, between which other requests take steps; shorter ones in one pass.

A pass has the prompts that wait, oldest first, as many as it has rows for, and a step of the requests that run. It is
for prompts that are computed for the first time and that no one reads. The CPU, several cards, and models with
recurrent layers compute prompts one by one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.prompt_readers import forward_and_read
from polarlm.engine.requests.request import Prefill, Request
from polarlm.engine.requests.scheduler import GAP, Scheduler
from polarlm.engine.sampling.sample import Sampled, SamplerInput
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.finer.blocks import CodingAgain
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import SequenceKV, Span
from polarlm.engine.storage.copies import restore
from polarlm.engine.storage.tiers.tiers import Tiers

Tokens = Callable[[], list[Sampled]]  # waits for them

_RECENT = 4  # passes
_MANY_ROWS = 256  # of a pass: fewer take as long as reading the weights, whatever their number


class Prefills:
    """The prefills of a `Runner`, whose caller holds the engine's lock."""

    def __init__(
        self,
        model: Transformer,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        coding: CodingAgain,
        tiers: Tiers | None,
        release: Callable[[Request], None],
        arrived: Callable[[], float],
    ) -> None:
        """release: releases what a request holds. arrived: called when the tokens of a prefill arrive."""
        self._model, self._store, self._prefixes = model, model.store, prefixes
        self._scheduler, self._coding, self._tiers = scheduler, coding, tiers
        self._release, self._arrived = release, arrived
        self._rates = deque([math.inf], _RECENT)  # rows per second of the latest passes of many rows
        self.launched: list[Request] = []  # for each unit of a prompt that a GPU may still compute, its request

    def run(self, requests: Sequence[Request], running: Sequence[Request], computed: list[Request]) -> None:
        """Run one unit: a part of the first request's prefill, or a pass with prompts of the others and a step of the
        running ones. computed: gets the requests that take part."""
        request = requests[0]
        self._take_part([request], computed)
        try:
            missing = self._missing(request)
            if missing is None:
                return
            joins = self._joins(request, missing)
            is_turn = self._fits_in_a_step(request) and not request.sequence.generated
            if joins:
                self._run_pass([request, *self._beside(request, requests[1:])], running, computed)
                return
            if request.prefill is None and missing > 0 and not is_turn:
                request.prefill = self._begin(request)
        except OutOfBlocks:
            self._requeue(request)
            return
        self._scheduler.admit(request.sequence)
        computable = request.sequence.computable  # read now: tokens that are forced after the first one belong to steps
        if request.prefill is None:
            self._scheduler.prefilled(request.sequence, missing)
            return
        self._advance(request, request.prefill)
        if request.prefill is None and request.kv is not None and request.kv.length == computable:
            self._scheduler.prefilled(request.sequence)

    @staticmethod
    def _take_part(requests: Sequence[Request], computed: list[Request]) -> None:
        for request in requests:
            request.clock.begin(prefilling=True)
            computed.append(request)

    def _requeue(self, request: Request) -> None:
        """Let a request wait for room; finish or fail it if there never will be any."""
        self._release(request)
        if self._scheduler.requeue(request.sequence):
            return
        if request.reads_prompt and not request.sequence.generated:
            request.fail(EngineError("The KV store has no room for this prompt: shorten it", "out_of_memory"))
        else:
            request.finish("length")

    # -- what the store has of a prompt --------------------------------------------------------------------------

    def _missing(self, request: Request) -> int | None:
        """Return how many tokens the store lacks of a request, whose prefix is matched now; None if it has to wait for
        blocks that are coded again or put back. Raises OutOfBlocks."""
        if request.kv is None:
            kept = 0 if request.saved is None else request.saved.length
            if request.hit is not None:
                kept += request.hit.tokens_left
            if kept and self._coding.must_wait(kept):
                return None
            if request.hit is not None and request.hit.put_back():
                return None  # the next unit puts back the next part
            request.kv = self._restored(request) or self._match_prefix(request)
            request.kv.adapter, request.kv.places = request.adapter, request.places
            if request.sequence.generated == 0:
                request.cached = request.kv.length
        missing = request.sequence.computable - request.kv.length
        waits = request.prefill is None and missing > 0 and self._coding.must_wait(missing)
        return None if waits else missing

    def _restored(self, request: Request) -> SequenceKV | None:
        if request.saved is None:
            return None
        kv = self._prefixes.salted(restore(self._store, request.saved), request.salt)
        request.saved = None
        return kv

    def _match_prefix(self, request: Request) -> SequenceKV:
        """Return the longest stored prefix of a request's tokens that it can continue from."""
        options = request.options
        ids = request.sequence.ids[:-1] if options.cache_prompt and not request.reads_prompt else ()
        kv = self._prefixes.match_prefix(ids, request.salt)
        if request.reproduces(kv.length):
            return kv
        self._prefixes.release(kv, ids)
        return self._prefixes.match_prefix(ids[: request.cached], request.salt)

    def _fits_in_a_step(self, request: Request) -> bool:
        """Whether what the store lacks of a prompt becomes rows of the request's first step: in the current block they
        see the same as in a prompt. Snapshots of recurrent layers, and readers, need a prompt."""
        assert request.kv is not None
        has_rows = request.sequence.max_tokens > 0 and not request.reads_prompt and not self._store.sparse_groups
        has_rows = has_rows and request.sequence.text_from <= request.kv.length
        return has_rows and 0 < len(request.sequence.prompt) - request.kv.length <= self._store.rows_of_block(
            request.kv
        )

    # -- passes ------------------------------------------------------------------------------------------------

    @property
    def _pass_rows(self) -> int:
        """The most rows of a pass; beside running requests, as many as the fastest of recent ones of many rows had in
        `GAP`."""
        if not self._scheduler.running:
            return self._model.pass_rows
        return int(min(self._model.pass_rows // 2, max(self._rates) * GAP))

    def _joins(self, request: Request, missing: int) -> bool:
        """Whether a matched prompt, which lacks `missing` tokens, is computed in a pass."""
        assert request.kv is not None
        is_first = request.prefill is None and request.sequence.generated == 0 and request.kv.length == request.cached
        if not is_first or request.reads_prompt or missing < 1 or request.kv.length < request.sequence.text_from:
            return False
        return self._rows(request) <= self._pass_rows and not self._fits_in_a_step(request)

    def _rows(self, request: Request) -> int:
        """The rows of a prompt in a pass, filled up to whole blocks, as in its buffer."""
        assert request.kv is not None
        first, n = self._store.first_of_block(request.kv), self._store.shape.block_size
        return -(-(len(request.sequence.prompt) - first) // n) * n

    def _beside(self, first: Request, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests whose prompts, matched now, are computed in a pass with the prompt of `first`."""
        chosen, rows = list[Request](), self._rows(first)
        for request in waiting:
            if request.kv is not None or request.saved is not None or request.hit is not None:
                break
            try:
                missing = self._missing(request)
            except OutOfBlocks:
                break
            if missing is not None and self._joins(request, missing):
                rows += self._rows(request)
                if rows <= self._pass_rows and not self._coding.must_wait(rows):
                    chosen.append(request)
                    continue
            self._unmatch(request)
            break
        return chosen

    def _unmatch(self, request: Request) -> None:
        """Let a matched request wait with nothing in the store."""
        if request.kv is not None:
            self._prefixes.release(request.kv, request.sequence.ids)
            request.kv = None

    def _run_pass(self, requests: Sequence[Request], running: Sequence[Request], computed: list[Request]) -> None:
        """Compute the prompts of these requests as far as there is room, others of them wait; and a step of the running
        ones, if there is room for all. Raises OutOfBlocks if there is no room for the first request, which takes part
        already, and DeviceLost."""
        spans, started = self._open(requests), time.perf_counter()
        requests = requests[: len(spans)]
        self._take_part(requests[1:], computed)
        try:
            steps, tokens = self._compute(requests, spans, running)
        except Exception:
            self._model.ops.check()
            if len(requests) == 1 and not running:
                raise
            for request in requests:  # one by one: what fails a request harms nobody else
                if not request.sequence.finished:
                    self._run_alone(request)
            return
        self._take_tokens(requests, spans, steps, tokens)
        rows = sum(span.count for span in [*spans, *steps.values()])
        if rows >= _MANY_ROWS:
            self._rates.append(rows / (time.perf_counter() - started))
        if steps:
            computed.extend(steps)
            self._scheduler.take_step()

    def _run_alone(self, request: Request) -> None:
        try:
            spans = self._open([request])
            self._take_tokens([request], spans, *self._compute([request], spans, ()))
        except OutOfBlocks:
            self._unmatch(request)
        except Exception as error:
            self._model.ops.check()
            request.fail(error)

    def _open(self, requests: Sequence[Request]) -> list[Span]:
        """Open spans for the prompts of the first requests: of half as many as long as there is no memory for their
        buffers. Raises OutOfBlocks, and MemoryError if there is none for the first one alone."""
        prompts = [(kv, len(one.sequence.prompt) - kv.length) for one in requests if (kv := one.kv) is not None]
        spans: list[Span] = []
        try:
            while not spans:
                try:
                    spans = self._store.open_pass(prompts)
                except MemoryError:
                    if len(prompts) == 1:
                        raise
                    prompts = prompts[: len(prompts) // 2]
        finally:
            for request in requests[max(1, len(spans)) :]:
                self._unmatch(request)
        return spans

    def _open_steps(self, running: Sequence[Request]) -> dict[Request, Span]:
        """Open the rows of a step, without drafts; none if there is no room for all."""
        steps: dict[Request, Span] = {}
        with suppress(OutOfBlocks), self._store.aborting(steps.values()):
            for request in running:
                assert request.kv is not None
                missing = len(request.sequence.ids) - request.kv.length
                request.clock.begin(not request.sequence.generated)
                steps[request] = self._store.open_step(request.kv, min(missing, self._store.rows_of_block(request.kv)))
            return steps
        return {}

    def _compute(
        self, requests: Sequence[Request], spans: Sequence[Span], running: Sequence[Request]
    ) -> tuple[dict[Request, Span], Tokens]:
        """Compute open spans of prompts and a step of running requests and commit them, and let the former take part in
        steps. Returns the rows of the step, and their tokens, as `_begin_tokens` does. Leaves no span open if it
        raises."""
        every = [*spans]
        with self._store.aborting(every):
            steps = self._open_steps(running)
            every += steps.values()
            ids = [one.sequence.ids[span.start :] for one, span in zip(requests, spans, strict=True)]
            of_steps = [one.sequence.ids[span.start : span.start + span.count] for one, span in steps.items()]
            hidden = self._model.forward_pass(spans, ids, [*steps.values()], [*chain.from_iterable(of_steps)])
            tokens = self._begin_tokens(requests, steps, hidden)  # before codes, for which no client waits
            self._store.commit_steps(every)
        for request, span in zip([*requests, *steps], every, strict=True):
            self._prefixes.insert(span.sequence, request.sequence.ids)
            request.report_progress(len(request.sequence.prompt))
        for request in requests:
            self._scheduler.admit(request.sequence)
            self._scheduler.prefilled(request.sequence)
        return steps, tokens

    def _begin_tokens(self, requests: Sequence[Request], steps: Mapping[Request, Span], hidden: Any) -> Tokens:
        """Begin to sample the token after each request's prompt, and after each row of the running ones, from the
        hidden states (B + S, E) of the prompts' last rows and of the S rows of the step; return what waits for them."""
        known = _known(steps)
        inputs = [self._sampler_input(request) for request in requests]
        for request, span in steps.items():
            last = request.sampler.none if request in known else self._sampler_input(request)
            inputs += [*[request.sampler.none] * (span.count - 1), last]
        if any(_expects_token(request) for request in [*requests, *steps]):
            return self._model.begin_choosing(hidden, inputs)
        return lambda: [0] * len(inputs)

    def _take_tokens(
        self, requests: Sequence[Request], spans: Sequence[Span], steps: Mapping[Request, Span], tokens: Tokens
    ) -> None:
        """Take the token after each request's prompt, and after the rows of each running one, from `_begin_tokens`."""
        known, sampled = _known(steps), tokens()
        self._arrived()
        for request in requests:
            request.clock.lap()
        if self._tiers is not None:
            self._tiers.computed(sum(span.count for span in spans), requests[0].clock.prefill)
        for request, token in zip(requests, sampled, strict=False):
            if _expects_token(request):
                request.take(token)
            elif not request.sequence.finished:
                request.finish("length")
        first = len(requests)
        for request, span in steps.items():
            rows = sampled[first : first + span.count]
            first += span.count
            token = next((row for row in rows if isinstance(row, EngineError)), rows[-1])
            if not request.sequence.finished and (request not in known or isinstance(token, EngineError)):
                request.take(token)

    @staticmethod
    def _sampler_input(request: Request) -> SamplerInput:
        if request.sequence.max_tokens > 0:
            try:
                return request.sampler.next()
            except Exception as error:  # raised by the request's constraint
                request.fail(error)
        return request.sampler.none

    # -- units -------------------------------------------------------------------------------------------------

    def _begin(self, request: Request) -> Prefill:
        """Open the request's next span and return its prefill. Raises OutOfBlocks."""
        assert request.kv is not None
        start = request.kv.length
        stop = request.span_end(start, self._store.shape.block_size)
        as_steps = start >= len(request.sequence.prompt) or (start == request.cached and self._fits_in_a_step(request))
        span = self._store.open(request.kv, stop - start, as_steps=as_steps)
        ids = request.sequence.ids[start:stop]
        reader = request.reader()
        if reader is not None:
            return Prefill(span, forward_and_read(self._model, span, ids, reader), reader)
        return Prefill(span, self._model.forward_units([span], ids, outputs=1, images=request.images))

    def _advance(self, request: Request, prefill: Prefill) -> None:
        """Run one unit of a prefill. After the last unit, commit its span and take the first token."""
        layers = len(self._model.config.layers)
        try:
            prefill.rows += next(prefill.units)
            request.report_progress((request.cached or 0) + prefill.rows // layers)
            if prefill.rows == prefill.span.count * layers:
                next(prefill.units)  # returns the hidden states, as StopIteration's value
            if self._model.ops.fetch_later is not None:
                self.launched.append(request)
        except StopIteration as end:
            tokens = None if request.sequence.generated else self._begin_tokens([request], {}, end.value)
            self._store.commit(prefill.span)
            if request.options.pooling is None:
                self._prefixes.insert(prefill.span.sequence, request.sequence.ids)
            request.prefill = None
            if prefill.reader is not None:
                request.outbox.append(prefill.reader.chunk())
            if tokens is not None:
                self._take_tokens([request], [prefill.span], {}, tokens)


def _known(steps: Mapping[Request, Span]) -> set[Request]:
    """Return the requests whose next token is known, so that none is taken."""
    return {one for one, span in steps.items() if span.start + span.count < len(one.sequence.ids)}


def _expects_token(request: Request) -> bool:
    return not request.sequence.finished and request.sequence.max_tokens > 0
