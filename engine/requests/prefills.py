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
from polarlm.engine.requests.plan import plan_of
from polarlm.engine.requests.request import Plan, Request
from polarlm.engine.requests.scheduler import GAP, Scheduler
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import SequenceKV
from polarlm.engine.storage.copies import restore
from polarlm.engine.storage.holes import rename_blocks


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
        most_rows, members = self._most_rows(running), [first]
        plan = self._plan(first, most_rows)
        is_shared = plan.rows > 0 and not (running or takes_steps or self._replayable)
        if requests[1:] and (plan.how == "join" or (plan.how == "step" and is_shared)):
            members += self._others(requests[1:], first, most_rows)
        if plan.how == "join":
            return self._batches.open_prompts(members, running if takes_steps else ())
        if plan.how == "alone":
            return self._batches.open_prompts(members)
        if plan.how == "step":
            self._begin_steps(members)
        return None

    def _most_rows(self, running: Sequence[Request]) -> int:
        """Return the most rows of prompts; with a step of the running requests, as many as the fastest of recent
        batches of many rows had in `GAP`."""
        if not running or not self._model.ops.batches_take_steps:
            return self._model.batch_rows
        return int(min(self._model.batch_rows // 2, max(self._batches.rates) * GAP))

    def _plan(self, request: Request, most_rows: int) -> Plan:
        """Find what the store has of a request, unless blocks are put back first, and give it a plan. Raises
        OutOfBlocks."""
        if request.kv is None and not (request.hit is not None and request.hit.put_back()):
            request.kv = self._restore(request) or self._longest_prefix(request)
            request.kv.adapter, request.kv.image_positions = request.adapter, request.image_positions
            if not request.sequence.generated:
                request.cached = request.kv.length
        request.plan = plan_of(request, self._store, most_rows, is_replayable=self._replayable)
        return request.plan

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
        ids = request.sequence.ids[:-1] if options.cache_prompt and not request.is_whole else ()
        if request.holes is not None and ids:
            rename_blocks(self._prefixes, request.holes)
        kv = self._prefixes.match_prefix(ids, request.salt)
        if cached < kv.length < len(request.sequence.prompt) and request.sequence.generated:
            self._prefixes.release(kv, ids)
            kv = self._prefixes.match_prefix(ids[:cached], request.salt)
        return kv

    def _begin_steps(self, requests: Sequence[Request]) -> None:
        """Let requests take part in steps; what they lack are rows of their first one."""
        for request in requests:
            assert request.kv is not None
            if self._replayable:
                self._store.plan_snapshots(request.kv, len(request.sequence.prompt))
            self._scheduler.end_prefill(request.sequence, request.plan.rows)

    # -- requests together -------------------------------------------------------------------------------------

    def _others(self, waiting: Sequence[Request], first: Request, most_rows: int) -> list[Request]:
        """Return the first waiting requests that have the same plan as `first`, matched now, as far as there is room.
        Prompts together take about as long as so many prompts of the first one's length."""
        chosen, how, rows, buffers = list[Request](), first.plan.how, first.plan.rows, self._buffer_rows(first)
        most, share, most_buffers = most_rows, rows + self._batches.few_rows, self._store.plan.tokens
        if how == "step":  # which has no buffers
            most = share = self._model.batch_rows
            most_buffers = sys.maxsize
        for request in waiting:
            if request.kv is not None or request.saved is not None or request.hit is not None:
                break
            try:
                plan = self._plan(request, most_rows)
            except OutOfBlocks:
                break
            has_room = False
            if plan.how == how:
                rows, buffers = rows + plan.rows, buffers + self._buffer_rows(request)
                has_room = rows <= min(most, share * (len(chosen) + 2)) and buffers <= most_buffers
            if not has_room:
                self._batches.unmatch(request)
                break
            chosen.append(request)
        return chosen

    def _buffer_rows(self, request: Request) -> int:
        """The rows of a prompt in its buffer, which has whole blocks."""
        assert request.kv is not None
        n = self._store.shape.block_size
        return -(-self._store.buffer_rows(request.kv, request.plan.rows) // n) * n
