"""Prefills: what the store has of a prompt, and which prompts are computed together.

What the store has is the longest stored prefix, what tiers put back, or what a preempted request saved. A batch has the
prompts that wait, oldest first, as many as it has rows for, and on a GPU a step of the requests that run. The first one
waits no longer for the others than if all shared the time. A batch is for prompts that are computed for the first time
and that no one reads. Several GPUs, and models with recurrent layers, compute prompts one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.model.forward import Transformer
from polarlm.engine.requests.batches import Batch, Batches
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
        request = requests[0]
        missing = self._match(request)
        if missing is None:
            return None
        if self._replayable and not self._needs_prefill(request):
            assert request.kv is not None
            self._store.plan_snapshots(request.kv, len(request.sequence.prompt))
            self._scheduler.admit(request.sequence)
            self._scheduler.end_prefill(request.sequence, missing)
            return None
        if self._joins(request, missing):
            others, takes_steps = self._others(requests[1:], self._room(request)), self._model.ops.batches_take_steps
            if others or takes_steps:
                return self._open_together([request, *others], running if takes_steps else ())
        batch, fits_in_a_step = None, self._fits_in_a_step(request)
        if missing > 0 and not (fits_in_a_step and not request.sequence.generated):
            assert request.kv is not None
            length = request.kv.length
            as_steps = length >= len(request.sequence.prompt) or (length == request.cached and fits_in_a_step)
            batch = self._batches.open_prefill(request, as_steps=as_steps)
        self._scheduler.admit(request.sequence)
        if batch is None:
            self._scheduler.end_prefill(request.sequence, missing)
            if missing > 0 and not running and not self._model.ops.batches_take_steps:
                self._join_step(requests[1:], missing)
        return batch

    # -- what the store has -------------------------------------------------------------------------------------

    def _match(self, request: Request) -> int | None:
        """Return how many tokens the store lacks of a request, whose prefix is matched now; None if it has to wait for
        blocks that are put back. Raises OutOfBlocks."""
        if request.kv is None:
            if request.hit is not None and request.hit.put_back():
                return None  # the next unit puts back the next part
            request.kv = self._restore(request) or self._longest_prefix(request)
            request.kv.adapter, request.kv.image_positions = request.adapter, request.image_positions
            if request.sequence.generated == 0:
                request.cached = request.kv.length
        return request.sequence.computable - request.kv.length

    def _restore(self, request: Request) -> SequenceKV | None:
        if request.saved is None:
            return None
        kv = self._prefixes.set_salt(restore(self._store, request.saved), request.salt)
        request.saved = None
        return kv

    def _longest_prefix(self, request: Request) -> SequenceKV:
        """Return the longest stored prefix of a request's tokens that it can continue from."""
        options = request.options
        ids = request.sequence.ids[:-1] if options.cache_prompt and not request.needs_whole_prompt else ()
        kv = self._prefixes.match_prefix(ids, request.salt)
        if request.reproduces(kv.length):
            return kv
        self._prefixes.release(kv, ids)
        return self._prefixes.match_prefix(ids[: request.cached], request.salt)

    def _needs_prefill(self, request: Request) -> bool:
        """Whether steps cannot compute what is left of a prompt that is computed as a whole."""
        assert request.kv is not None
        return request.needs_whole_prompt and request.kv.length < len(request.sequence.prompt)

    def _fits_in_a_step(self, request: Request) -> bool:
        """Whether what the store lacks of a prompt becomes rows of the request's first step: in the current block they
        see the same as in a prompt. Snapshots of recurrent layers, and readers, need a prompt."""
        assert request.kv is not None
        has_rows = request.sequence.max_tokens > 0 and not request.reads_prompt and not self._store.sparse_groups
        has_rows = has_rows and request.sequence.text_from <= request.kv.length
        missing = len(request.sequence.prompt) - request.kv.length
        return has_rows and 0 < missing <= self._store.rows_of_block(request.kv)

    # -- prompts together --------------------------------------------------------------------------------------

    @property
    def _most_rows(self) -> int:
        """The most rows of prompts; with a step of the running requests, as many as the fastest of recent batches of
        many rows had in `GAP`."""
        if not self._scheduler.running or not self._model.ops.batches_take_steps:
            return self._model.batch_rows
        return int(min(self._model.batch_rows // 2, max(self._batches.rates) * GAP))

    def _joins(self, request: Request, missing: int) -> bool:
        """Whether a matched prompt, which lacks `missing` tokens, is computed with others."""
        assert request.kv is not None
        is_first = request.sequence.generated == 0 and request.kv.length == request.cached
        if not is_first or request.reads_prompt or missing < 2 or request.kv.length < request.sequence.text_from:
            return False  # of one row alone, a CPU computes products in another way
        return missing <= self._most_rows and not self._fits_in_a_step(request)

    def _room(self, first: Request) -> Callable[[Request, int], bool]:
        """Return a function that says whether a prompt is computed with that of `first` and those that it was called
        for before. Together they take about as long as so many prompts of the first one's length."""
        rows, buffers, count, most = self._rows(first), self._buffer_rows(first), 1, self._most_rows
        share = rows + self._batches.few_rows

        def has_room(request: Request, missing: int) -> bool:
            nonlocal rows, buffers, count
            if not self._joins(request, missing):
                return False
            rows, buffers, count = rows + missing, buffers + self._buffer_rows(request), count + 1
            return rows <= min(most, share * count) and buffers <= self._store.plan.tokens

        return has_room

    def _rows(self, request: Request) -> int:
        assert request.kv is not None
        return len(request.sequence.prompt) - request.kv.length

    def _buffer_rows(self, request: Request) -> int:
        """The rows of a prompt in its buffer, which has whole blocks."""
        assert request.kv is not None
        n = self._store.shape.block_size
        return -(-self._store.buffer_rows(request.kv, self._rows(request)) // n) * n

    def _others(self, waiting: Sequence[Request], joins: Callable[[Request, int], bool]) -> list[Request]:
        """Return the first requests that join another one, of whose prompts, matched now, the store lacks so many
        tokens."""
        chosen = list[Request]()
        for request in waiting:
            if request.kv is not None or request.saved is not None or request.hit is not None:
                break
            try:
                missing = self._match(request)
            except OutOfBlocks:
                break
            if missing is None or not joins(request, missing):
                self._batches.unmatch(request)
                break
            chosen.append(request)
        return chosen

    def _join_step(self, waiting: Sequence[Request], rows: int) -> None:
        """Let further prompts be rows of the first step of a prompt, which has `rows`, and for which none waits."""

        def fits(request: Request, missing: int) -> bool:
            nonlocal rows
            rows += missing
            is_first = request.sequence.generated == 0
            return is_first and self._fits_in_a_step(request) and rows <= self._model.batch_rows

        for request in self._others(waiting, fits):
            self._scheduler.admit(request.sequence)
            self._scheduler.end_prefill(request.sequence, self._rows(request))

    def _open_together(self, requests: Sequence[Request], running: Sequence[Request]) -> Batch:
        """Open the prompts of these requests as far as there is room, others of them wait; and a step of the running
        ones, if there is room for all. Raises OutOfBlocks if there is no room for the first request."""
        opened = 1
        try:
            batch = self._batches.open_prompts(requests, running)
            opened = len(batch.prompts)
            if batch.chunks is not None:
                self._scheduler.admit(requests[0].sequence)
        finally:
            for request in requests[opened:]:
                self._batches.unmatch(request)
        return batch
