"""Prefills: carry out the plans of waiting requests, alone or together.

A batch has the prompts that wait, oldest first, as many as it has rows for, and on a GPU a step of the requests that
run. The first one waits no longer for the others than if all shared the time. Several GPUs, and models with recurrent
layers, compute prompts one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from polarlm.engine.model.forward import Transformer
from polarlm.engine.requests.batches import Batch, Batches
from polarlm.engine.requests.plan import Plan, plan_of
from polarlm.engine.requests.request import Request
from polarlm.engine.requests.scheduler import GAP, Scheduler
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import SequenceKV
from polarlm.engine.storage.copies import restore


class Prefills:
    """The prefills of a `Runner`, whose caller holds the engine's lock."""

    def __init__(
        self,
        model: Transformer,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        batches: Batches,
        replayable: bool,
    ) -> None:
        """replayable: compute prompts as rows of steps, whatever prefix is found: they see its codes as their own."""
        self._replayable = replayable
        self._model, self._store, self._prefixes = model, model.store, prefixes
        self._scheduler, self._batches = scheduler, batches

    def open(self, requests: Sequence[Request], running: Sequence[Request]) -> Batch | None:
        """Open the prompt of the first request, or its prompt with those of others and a step of the running requests.
        None if it waits, or if what it lacks becomes rows of its first step. Raises OutOfBlocks if there is no room for
        the first request."""
        first, takes_steps = requests[0], self._model.ops.batches_take_steps
        plan = self._plan(first)
        if plan.how == "join":
            members = [first, *self._others(requests[1:], first, plan)]
            return self._batches.open_prompts(members, plan, running if takes_steps else ())
        if plan.how == "alone":
            return self._batches.open_prompts([first], plan)
        if plan.how == "step":
            is_shared = plan.missing > 0 and not (running or takes_steps or self._replayable)
            self._begin_steps([first, *(self._others(requests[1:], first, plan) if is_shared else ())])
        return None

    def _plan(self, request: Request) -> Plan:
        """Find what the store has of a request, unless blocks are put back first, and return its plan. Raises
        OutOfBlocks."""
        if request.kv is None and not (request.hit is not None and request.hit.put_back()):
            request.kv = self._restore(request) or self._longest_prefix(request)
            request.kv.adapter, request.kv.image_positions = request.adapter, request.image_positions
            if not request.sequence.generated:
                request.cached = request.kv.length
        return plan_of(request, self._store, self._most_rows, is_replayable=self._replayable)

    def _restore(self, request: Request) -> SequenceKV | None:
        if request.saved is None:
            return None
        kv = self._prefixes.set_salt(restore(self._store, request.saved), request.salt)
        request.saved = None
        return kv

    def _longest_prefix(self, request: Request) -> SequenceKV:
        """Return the longest stored prefix of a request's tokens that it can continue from. A prompt attends to its own
        tokens in full precision and to a prefix as codes, so a preempted one gets no more of itself than at first."""
        options, cached = request.options, request.cached or 0
        ids = request.sequence.ids[:-1] if options.cache_prompt and not request.needs_whole_prompt else ()
        kv = self._prefixes.match_prefix(ids, request.salt)
        if request.sequence.generated and cached < kv.length < len(request.sequence.prompt):
            self._prefixes.release(kv, ids)
            kv = self._prefixes.match_prefix(ids[:cached], request.salt)
        return kv

    def _begin_steps(self, requests: Sequence[Request]) -> None:
        """Let requests take part in steps; what they lack are rows of their first one."""
        for request in requests:
            assert request.kv is not None
            if self._replayable:
                self._store.plan_snapshots(request.kv, len(request.sequence.prompt))
            self._scheduler.admit(request.sequence)
            self._scheduler.end_prefill(request.sequence, request.sequence.computable - request.kv.length)

    # -- requests together -------------------------------------------------------------------------------------

    def _others(self, waiting: Sequence[Request], first: Request, plan: Plan) -> list[Request]:
        """Return the first waiting requests that have the same plan as `first`, matched now, as far as there is room.
        Prompts together take about as long as so many prompts of the first one's length."""
        chosen, rows, buffers = list[Request](), plan.missing, self._buffer_rows(first, plan)
        most, share, most_buffers = self._most_rows, rows + self._batches.few_rows, self._store.plan.tokens
        if plan.how == "step":  # which has no buffers
            most, share, most_buffers = self._model.batch_rows, self._model.batch_rows, sys.maxsize
        for request in waiting:
            if request.kv is not None or request.saved is not None or request.hit is not None:
                break
            try:
                other = self._plan(request)
            except OutOfBlocks:
                break
            has_room = False
            if other.how == plan.how:
                rows, buffers = rows + other.missing, buffers + self._buffer_rows(request, other)
                has_room = rows <= min(most, share * (len(chosen) + 2)) and buffers <= most_buffers
            if not has_room:
                self._batches.unmatch(request)
                break
            chosen.append(request)
        return chosen

    @property
    def _most_rows(self) -> int:
        """The most rows of prompts; with a step of the running requests, as many as the fastest of recent batches of
        many rows had in `GAP`."""
        if not self._scheduler.running or not self._model.ops.batches_take_steps:
            return self._model.batch_rows
        return int(min(self._model.batch_rows // 2, max(self._batches.rates) * GAP))

    def _buffer_rows(self, request: Request, plan: Plan) -> int:
        """The rows of a prompt in its buffer, which has whole blocks."""
        assert request.kv is not None
        n = self._store.shape.block_size
        return -(-self._store.buffer_rows(request.kv, plan.missing) // n) * n
