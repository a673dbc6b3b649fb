"""Runs the scheduler's units: parts of prefills, and steps of all running requests. Preempts when blocks run out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from polarlm.engine.backends.numpy import host_memory
from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.prompt_readers import forward_and_read
from polarlm.engine.outputs import CacheStats, ExpertStatus, SnapshotStatus, Status
from polarlm.engine.requests.drafts import Drafting
from polarlm.engine.requests.request import Prefill, Request
from polarlm.engine.requests.scheduler import Scheduler, TokenSequence, Unit
from polarlm.engine.requests.steps import Steps
from polarlm.engine.state.blocks import BlockAllocator, OutOfBlocks
from polarlm.engine.state.cache_types import TWO_KINDS, of_two_kinds
from polarlm.engine.state.finer.blocks import CodingAgain
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import SequenceKV
from polarlm.engine.storage.copies import export, restore
from polarlm.engine.storage.tiers.tiers import Tiers


@dataclass(frozen=True)
class StoredSequence:
    """A released sequence that the prefix cache can find."""

    ids: tuple[int, ...] = ()  # ids of its stored tokens
    bytes: int = 0
    salt: str = ""  # what it is found with; see `engine.state.prefix`


class Runner:
    """Holds all queued and running requests and runs their units of work. The caller holds the engine's lock."""

    def __init__(
        self,
        model: Transformer,
        prefixes: PrefixCache,
        scheduler: Scheduler,
        drafting: Drafting,
        tiers: Tiers | None = None,
    ):
        self._model, self._store, self._prefixes = model, model.store, prefixes
        self._scheduler, self._tiers, self._draft = scheduler, tiers, drafting.model
        self.requests: dict[TokenSequence, Request] = {}
        self.newest = StoredSequence()
        self._coding = CodingAgain(self._store.finer)
        self._steps = Steps(model, prefixes, scheduler, self._preempt, self._arrived, drafting.seconds)
        self._launched: list[Request] = []  # for each unit of a prompt that a GPU may still compute, its request

    def submit(self, request: Request) -> None:
        request.why_damaged = self._model.weights.why_damaged
        self.requests[request.sequence] = request
        self._scheduler.submit(request.sequence)

    def run_unit(self) -> None:
        """Run the next unit of work, if there is one. An error fails only the requests of that unit."""
        is_late = bool(self._launched and self._scheduler.running)  # a step makes the time of a prompt's unit known
        unit = self._scheduler.schedule(in_step=self._steps.has_begun or is_late)
        if unit is None:
            return
        requests = [self.requests[sequence] for sequence in unit.sequences]
        self._computed, self._started = requests, time.perf_counter()
        for request in requests:
            request.clock.begin(unit.is_prefill or not request.sequence.generated)
        try:
            if unit.is_prefill:
                self._prefill(requests[0])
            else:
                self._steps.run(requests)
        except Exception as error:
            for request in self._affected(requests, is_prefill=unit.is_prefill):
                request.fail(error)
        except BaseException:  # Ctrl-C, maybe in a thread that waits for a request of another unit
            for request in self._affected(requests, is_prefill=unit.is_prefill):
                request.finish("cancelled")
            raise
        finally:
            self._scheduler.record_time(unit, time.perf_counter() - self._started)
            for request in requests:
                request.clock.lap()
            self.sweep()
        self._coding.between_units(self._scheduler.usual_step)

    def _arrived(self) -> float:
        """Tokens of the unit have arrived. What it took beyond a usual step, a GPU spent on prompts before it. Return
        when it began without that."""
        usual, launched, self._launched = self._scheduler.usual_step, self._launched, []
        if usual is not None and launched:
            late = max(0.0, time.perf_counter() - self._started - usual)
            self._started += late
            for request in self._computed:
                request.clock.since += late
            for request in launched:
                request.clock.prefill += late / len(launched)
                self._scheduler.record_time(Unit(True, (request.sequence,)), late / len(launched))
        return self._started

    def makes_room(self, tokens: int) -> bool:
        """Code blocks again for no longer than a step takes if `tokens` lack room; return whether they did."""
        is_short = self._coding.must_wait(tokens)
        if is_short:
            self._coding.between_units(self._scheduler.usual_step)
        return is_short

    @staticmethod
    def _affected(requests: Sequence[Request], *, is_prefill: bool) -> list[Request]:
        """Return the requests that an error in this unit fails."""
        return [r for r in requests if not r.sequence.finished and (is_prefill or r.kv is not None)]

    def status(self) -> Status:
        groups = self._store.groups
        counted = [group.quantized for group in groups if not group.is_sparse]
        size, free, kept = _counts(counted)
        sparse = [group.quantized for group in groups if group.is_sparse]
        room, unused, known = _counts(sparse)
        running, threads = self._scheduler.running, self._model.ops.threads()
        cache = self._model.weights.expert_cache
        if threads is not None:
            of_draft = [] if self._draft is None else self._draft.store.in_numpy()
            clauses = [*self._store.in_numpy(), *(f"draft model: {clause}" for clause in of_draft)]
            threads = replace(threads, why="; ".join([threads.why, *clauses]))
        return Status(
            running=running,
            waiting=len(self.requests) - running,
            prefilling=self._scheduler.prefilling,
            blocks=size,
            blocks_used=size - free,
            blocks_kept=kept,
            blocks_free=free - kept,
            threads=threads,
            backend=self._model.ops.backend,
            tiers=() if self._tiers is None else self._tiers.status(),
            experts=None if cache is None else ExpertStatus(cache.experts, cache.hits, cache.misses, cache.bytes),
            types=self._blocks_by_type(),
            blocks_of_largest=max((blocks.size for blocks in counted), default=0),
            snapshots=SnapshotStatus(room, room - unused, known, self._store.plan.snapshot_bytes) if sparse else None,
        )

    def _blocks_by_type(self) -> dict[str, int] | None:
        """Return the number of blocks by type; None if all have the same type."""
        finer = self._store.finer
        if finer is None:
            return None
        names = TWO_KINDS[of_two_kinds(self._store.shape)].names
        return dict(zip(names, finer.blocks.places.counts(), strict=True))

    def cache_stats(self) -> CacheStats:
        newest, shape = self.newest, self._store.shape
        return CacheStats(
            tokens=len(newest.ids),
            bytes=newest.bytes,
            bits_per_value=shape.bits_per_value,
            f16_bytes=shape.f16_bytes(len(newest.ids)),
            context=self._store.plan.tokens,
        )

    def fail_all(self, error: Exception) -> None:
        """Fail all requests that have not finished or been cancelled."""
        self.sweep()
        for request in self.requests.values():
            request.fail(error)
        self.sweep()

    def sweep(self) -> None:
        """Remove finished and cancelled requests. The prefix cache can still find their blocks."""
        for request in [request for request in self.requests.values() if request.sequence.finished]:
            self._scheduler.remove(request.sequence)
            del self.requests[request.sequence]
            self._release(request)

    def _release(self, request: Request) -> None:
        """Abort the request's spans and release its K/V to the prefix cache; discard them if they are damaged."""
        self._steps.leave(request)
        if request.drafts is not None:
            request.drafts.release()
        prefill, kv, request.prefill, request.kv = request.prefill, request.kv, None, None
        if prefill is not None:
            self._store.abort(prefill.span)
        if kv is None:
            return
        if request.damaged:
            self._prefixes.discard(kv)
        elif request.options.pooling is not None:  # no conversation continues an embedded text
            self._store.release(kv)
        else:
            self.release(request.sequence.ids, kv, request.salt)

    def _preempt(self) -> bool:
        """Preempt the youngest request. False if only one request computes."""
        youngest = self._scheduler.preempt()
        if youngest is not None:
            self._save(self.requests[youngest])
            self._release(self.requests[youngest])
        return youngest is not None

    def _save(self, request: Request) -> None:
        """Copy what the store holds of a request to the computer's memory: what is computed again is rounded in another
        way.

        All copies take at most `StorePlan.copy_bytes`, and each half of the free memory; without room, it is computed
        again.
        """
        if request.kv is None or request.kv.length < len(request.sequence.prompt):
            return
        others = sum(one.saved.bytes for one in self.requests.values() if one.saved is not None)
        held = self._store.bytes_held(request.kv)
        if others + held <= self._store.plan.copy_bytes and held <= host_memory.available() // 2:
            with suppress(MemoryError):
                request.saved = export(self._store, request.kv, request.sequence.ids)

    def _restored(self, request: Request) -> SequenceKV | None:
        if request.saved is None:
            return None
        kv = self._prefixes.salted(restore(self._store, request.saved), request.salt)
        request.saved = None
        return kv

    def release(self, ids: Sequence[int], kv: SequenceKV, salt: str) -> None:
        """Release the sequence with tokens ids[:kv.length] to the prefix cache. Unless empty, it becomes `newest`."""
        if kv.length:
            self.newest = StoredSequence(tuple(ids[: kv.length]), self._store.bytes_held(kv), salt)
        length, root, hashes = kv.length, kv.root, kv.hashes
        self._prefixes.release(kv, ids)
        if self._tiers is not None:
            self._tiers.released(root, hashes, ids[:length])

    # -- prefill -----------------------------------------------------------------------------------------------

    def _prefill(self, request: Request) -> None:
        """Run one unit of a prefill, or requeue the request if there is no room for it."""
        try:
            if request.kv is None:
                kept = 0 if request.saved is None else request.saved.length
                if request.hit is not None:
                    kept += request.hit.tokens_left
                if kept and self._coding.must_wait(kept):
                    return
                if request.hit is not None and request.hit.put_back():
                    return  # the next unit puts back the next part
                request.kv = self._restored(request) or self._match_prefix(request)
                request.kv.adapter = request.adapter
                if request.sequence.generated == 0:
                    request.cached = request.kv.length
            missing = request.sequence.computable - request.kv.length
            if request.prefill is None and missing > 0:
                if self._coding.must_wait(missing):
                    return
                if request.sequence.generated or not self._fits_in_a_step(request):
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
        computable = request.sequence.computable  # read now: tokens that are forced after the first one belong to steps
        if request.prefill is None:
            self._scheduler.prefilled(request.sequence, missing)
            return
        self._advance(request, request.prefill)
        if request.prefill is None and request.kv.length == computable:
            self._scheduler.prefilled(request.sequence)

    def _fits_in_a_step(self, request: Request) -> bool:
        """Whether what the store lacks of a prompt becomes rows of the request's first step: in the current block they
        see the same as in a prompt. Snapshots of recurrent layers, and readers, need a prompt."""
        assert request.kv is not None
        has_rows = request.sequence.max_tokens > 0 and not request.reads_prompt and not self._store.sparse_groups
        return has_rows and 0 < len(request.sequence.prompt) - request.kv.length <= self._store.rows_of_block(
            request.kv
        )

    def _match_prefix(self, request: Request) -> SequenceKV:
        """Return the longest stored prefix of a request's tokens that it can continue from."""
        options = request.options
        ids = request.sequence.ids[:-1] if options.cache_prompt and not request.reads_prompt else ()
        kv = self._prefixes.match_prefix(ids, request.salt)
        if request.reproduces(kv.length):
            return kv
        self._prefixes.release(kv, ids)
        return self._prefixes.match_prefix(ids[: request.cached], request.salt)

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
        return Prefill(span, self._model.forward_units([span], ids, outputs=1))

    def _advance(self, request: Request, prefill: Prefill) -> None:
        """Run one unit of a prefill. After the last unit, commit its span and take the first token."""
        layers = len(self._model.config.layers)
        try:
            prefill.rows += next(prefill.units)
            request.report_progress((request.cached or 0) + prefill.rows // layers)
            if prefill.rows == prefill.span.count * layers:
                next(prefill.units)  # returns the hidden states, as StopIteration's value
            if self._model.ops.fetch_later is not None:
                self._launched.append(request)
        except StopIteration as end:
            self._store.commit(prefill.span)
            if request.options.pooling is None:
                self._prefixes.insert(prefill.span.sequence, request.sequence.ids)
            request.prefill = None
            if prefill.reader is not None:
                request.outbox.append(prefill.reader.chunk())
            if request.sequence.generated:
                return
            is_last = request.sequence.max_tokens == 0
            sampled = [] if is_last else self._model.choose(end.value, [request.sampler.next()])
            self._arrived()
            request.clock.lap()
            if self._tiers is not None:
                self._tiers.computed(prefill.span.count, request.clock.prefill)
            if is_last:
                request.finish("length")
            else:
                request.take(sampled[0])


def _counts(allocators: Sequence[BlockAllocator]) -> tuple[int, int, int]:
    """Return the numbers of all blocks, of blocks that no request holds, and of the latter that the cache can find."""
    return sum(one.size for one in allocators), sum(one.free for one in allocators), sum(one.kept for one in allocators)
