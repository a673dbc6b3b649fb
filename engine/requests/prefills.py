"""Prefills: what the store has of a prompt, and which prompts are computed together.

What the store has is the longest stored prefix, what tiers put back, or what a preempted request saved. A batch has the
prompts that wait, oldest first, as many as it has rows for, and a step of the requests that run. It is for prompts that
are computed for the first time and that no one reads. The CPU, several GPUs, and models with recurrent layers compute
prompts one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.model.forward import Transformer
from polarlm.engine.requests.batches import Batch, Batches
from polarlm.engine.requests.request import Request
from polarlm.engine.requests.scheduler import GAP, Scheduler
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.requantize.blocks import Requantizer
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
        requantizer: Requantizer,
    ) -> None:
        self._model, self._store, self._prefixes = model, model.store, prefixes
        self._scheduler, self._batches, self._requantizer = scheduler, batches, requantizer

    def open(self, requests: Sequence[Request], running: Sequence[Request]) -> Batch | None:
        """Open the prompt of the first request, or its prompt with those of others and a step of the running requests.
        None if it waits, or if what it lacks becomes rows of its first step. Raises OutOfBlocks if there is no room for
        the first request."""
        request = requests[0]
        missing = self._match(request)
        if missing is None:
            return None
        if self._joins(request, missing):
            return self._open_together([request, *self._others(request, requests[1:])], running)
        batch, fits_in_a_step = None, self._fits_in_a_step(request)
        if missing > 0 and not (fits_in_a_step and not request.sequence.generated):
            assert request.kv is not None
            length = request.kv.length
            as_steps = length >= len(request.sequence.prompt) or (length == request.cached and fits_in_a_step)
            batch = self._batches.open_prefill(request, as_steps=as_steps)
        self._scheduler.admit(request.sequence)
        if batch is None:
            self._scheduler.prefilled(request.sequence, missing)
        return batch

    # -- what the store has -------------------------------------------------------------------------------------

    def _match(self, request: Request) -> int | None:
        """Return how many tokens the store lacks of a request, whose prefix is matched now; None if it has to wait for
        blocks that are requantized or put back. Raises OutOfBlocks."""
        if request.kv is None:
            stored = 0 if request.saved is None else request.saved.length
            if request.hit is not None:
                stored += request.hit.tokens_left
            if stored and self._requantizer.must_wait(stored):
                return None
            if request.hit is not None and request.hit.put_back():
                return None  # the next unit puts back the next part
            request.kv = self._restored(request) or self._longest_prefix(request)
            request.kv.adapter, request.kv.image_positions = request.adapter, request.image_positions
            if request.sequence.generated == 0:
                request.cached = request.kv.length
        missing = request.sequence.computable - request.kv.length
        return None if missing > 0 and self._requantizer.must_wait(missing) else missing

    def _restored(self, request: Request) -> SequenceKV | None:
        if request.saved is None:
            return None
        kv = self._prefixes.set_salt(restore(self._store, request.saved), request.salt)
        request.saved = None
        return kv

    def _longest_prefix(self, request: Request) -> SequenceKV:
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
        missing = len(request.sequence.prompt) - request.kv.length
        return has_rows and 0 < missing <= self._store.rows_of_block(request.kv)

    # -- prompts together --------------------------------------------------------------------------------------

    @property
    def _most_rows(self) -> int:
        """The most rows of prompts; with running requests, as many as the fastest of recent batches of many rows had in
        `GAP`."""
        if not self._scheduler.running:
            return self._model.batch_rows
        return int(min(self._model.batch_rows // 2, max(self._batches.rates) * GAP))

    def _joins(self, request: Request, missing: int) -> bool:
        """Whether a matched prompt, which lacks `missing` tokens, is computed with others."""
        assert request.kv is not None
        is_first = request.sequence.generated == 0 and request.kv.length == request.cached
        if not is_first or request.reads_prompt or missing < 1 or request.kv.length < request.sequence.text_from:
            return False
        return self._rows(request) <= self._most_rows and not self._fits_in_a_step(request)

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
                missing = self._match(request)
            except OutOfBlocks:
                break
            if missing is not None and self._joins(request, missing):
                rows += self._rows(request)
                if rows <= self._most_rows and not self._requantizer.must_wait(rows):
                    chosen.append(request)
                    continue
            self._batches.unmatch(request)
            break
        return chosen

    def _open_together(self, requests: Sequence[Request], running: Sequence[Request]) -> Batch:
        """Open the prompts of these requests as far as there is room, others of them wait; and a step of the running
        ones, if there is room for all. Raises OutOfBlocks if there is no room for the first request."""
        opened = 1
        try:
            batch = self._batches.open_prompts(requests, running)
            opened = len(batch.prompts)
        finally:
            for request in requests[opened:]:
                self._batches.unmatch(request)
        return batch
