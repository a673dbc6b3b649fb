"""Runs the scheduler's units: parts of prefills, and steps of all running requests. Preempts when blocks run out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from polarlm.engine.backends.numpy import host_memory
from polarlm.engine.errors import DeviceLost, EngineError
from polarlm.engine.model.forward import ModelWeights, Transformer
from polarlm.engine.model.warm_up import recording_warm_ups
from polarlm.engine.requests.batches import Batch, Batches
from polarlm.engine.requests.drafts import Drafting
from polarlm.engine.requests.prefills import Prefills
from polarlm.engine.requests.request import Request, UnitTimer
from polarlm.engine.requests.scheduler import Scheduler, TokenSequence, Unit
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.store import SequenceKV
from polarlm.engine.storage.copies import export
from polarlm.engine.storage.tiers.patience import Patience
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
        patience: Patience,
        tiers: Tiers | None = None,
        replayable: bool = False,
    ):
        """replayable: compute prompts as rows of steps."""
        self._model, self._store, self._prefixes = model, model.store, prefixes
        self._scheduler, self._tiers = scheduler, tiers
        self.requests: dict[TokenSequence, Request] = {}
        self._lost: DeviceLost | None = None  # why nothing can be computed any more
        self.newest = StoredSequence()
        self._warm_ups = recording_warm_ups(model, scheduler.parallel)
        self._timer = timer = UnitTimer(scheduler)
        self._batches = Batches(model, prefixes, scheduler, patience, timer, self._preempt, drafting.seconds)
        self._prefills = Prefills(model, prefixes, scheduler, self._batches, replayable)

    def submit(self, request: Request) -> None:
        self.requests[request.sequence] = request
        self._scheduler.submit(request.sequence)

    def run_unit(self) -> None:
        """Run the next unit of work, if there is one. An error fails only the requests of that unit; one that the
        device does not survive fails all."""
        while self._batches.next_step is None and (sequence := self._scheduler.hinderer) is not None:
            self._scheduler.suspend(sequence)
            self._give_up(self.requests[sequence])
        # With a step, the time is known that a GPU has spent on chunks of prompts.
        is_late = self._timer.launched and self._scheduler.running
        unit = self._scheduler.schedule(in_step=self._batches.next_step is not None or bool(is_late))
        if unit is None:
            return
        with self._working(unit):
            batch = self._next_batch(unit)
            if batch is not None:
                self._batches.run(batch)
        self._encode_ahead()

    def _next_batch(self, unit: Unit) -> Batch | None:
        """Return the next batch: a long prompt or the step that has begun, or another one, opened; None if its requests
        wait or have ended."""
        requests = [self.requests[sequence] for sequence in unit.sequences]
        if not unit.is_prefill:
            self._timer.add(*requests)
            step, self._batches.next_step = self._batches.next_step, None
            return step or self._batches.open_step(requests)
        if self._batches.prefill is not None:
            self._timer.add(*(rows.request for rows in self._batches.prefill.active))
            return self._batches.prefill
        self._timer.add(requests[0])
        try:
            return self._prefills.open(requests, [self.requests[sequence] for sequence in unit.running])
        except OutOfBlocks:
            self._requeue(requests[0])
            return None

    def _requeue(self, request: Request) -> None:
        """Let a request wait for room; finish or fail it if there never will be any."""
        self._release(request)
        if self._scheduler.requeue(request.sequence):
            return
        if request.is_whole and not request.sequence.generated:
            request.fail(EngineError("The KV store has no room for this prompt: shorten it", "out_of_memory"))
        else:
            request.finish("length")

    @contextmanager
    def _working(self, unit: Unit) -> Iterator[None]:
        """A context for a unit of work: its time is taken, an error fails its requests, and finished ones are removed
        at its end."""
        self._timer.begin()
        try:
            yield
        except Exception as error:
            if not self._is_lost():
                for request in self._affected_requests(is_prefill=unit.is_prefill):
                    request.fail(error)
        except BaseException:  # Ctrl-C, maybe in a thread that waits for a request of another unit
            for request in self._affected_requests(is_prefill=unit.is_prefill):
                request.finish("cancelled")
            raise
        finally:
            self._timer.end(unit)
            self.sweep()

    def _encode_ahead(self) -> None:
        """Encode blocks between two units. Without memory for that, it is tried again after the next unit."""
        try:
            self._store.encode_ahead()
        except Exception as error:
            if not self._is_lost() and not isinstance(error, MemoryError):
                raise

    def _affected_requests(self, *, is_prefill: bool) -> list[Request]:
        """Return the requests that an error in this unit fails."""
        return [r for r in self._timer.requests if not r.sequence.finished and (is_prefill or r.kv is not None)]

    def replace_weights(self, weights: ModelWeights) -> None:
        """Compute with these weights, which differ in what adapters add; all is recorded anew."""
        self._batches.abort_next()
        self._model.replace_weights(weights)
        self._warm_ups = recording_warm_ups(self._model, self._scheduler.parallel)

    def _is_lost(self) -> bool:
        """Return whether the device works no more, after an error; all requests have failed then."""
        try:
            self._model.ops.check()
        except DeviceLost as error:
            self._lost = error
            self.fail_all(error)
        return self._lost is not None

    def warm_up(self, *, is_compiled: bool) -> bool:
        """Call the next of `recording_warm_ups`, unless there is a request; return whether there are more. is_compiled:
        whether their kernels are, for which a request would otherwise wait."""
        if is_compiled and self._warm_ups and not self.requests:
            try:
                self._warm_ups.pop(0)()
            except Exception:  # an error of the requests that need it
                self._warm_ups.clear()
                self._is_lost()
        return bool(self._warm_ups)

    def check(self) -> None:
        """Raise DeviceLost if nothing can be computed any more."""
        if self._lost is not None:
            raise DeviceLost(str(self._lost))

    def fail_all(self, error: Exception) -> None:
        """Fail all requests that have not finished or been cancelled."""
        self.sweep()
        for request in self.requests.values():
            request.fail(error)
        self.sweep()

    def sweep(self) -> None:
        """Remove finished and cancelled requests. The prefix cache can still find their blocks."""
        for request in [one for one in self.requests.values() if one.sequence.finish_reason is not None]:
            self._scheduler.remove(request.sequence)
            del self.requests[request.sequence]
            self._release(request)

    def _release(self, request: Request) -> None:
        """Abort the request's spans and release its K/V to the prefix cache; discard them if they are damaged."""
        self._batches.leave(request)
        if request.drafts is not None:
            request.drafts.release()
        kv, request.kv = request.kv, None
        if kv is None:
            return
        if request.damaged or self._lost is not None:
            self._prefixes.discard(kv)
        elif request.options.pooling is not None:  # no conversation continues an embedded text
            self._store.release(kv)
        else:
            self.release(request.sequence.ids, kv, request.salt, request.options.keep_seconds)

    def _preempt(self) -> bool:
        """Preempt the youngest request. False if only one request computes."""
        youngest = self._scheduler.preempt()
        if youngest is not None:
            self._give_up(self.requests[youngest])
        return youngest is not None

    def _give_up(self, request: Request) -> None:
        """Save what the store holds of a request that waits now, and release its blocks."""
        self._save(request)
        self._release(request)

    def _save(self, request: Request) -> None:
        """Copy what the store holds of a request to the computer's memory: what is computed again is rounded in another
        way.

        All copies take at most `StorePlan.copy_bytes`, and each half of the free memory; without room, it is computed
        again.
        """
        if request.kv is None or request.kv.length < len(request.sequence.prompt):
            return
        others = sum(one.saved.bytes for one in self.requests.values() if one.saved is not None)
        size = self._store.bytes_held(request.kv)
        if others + size <= self._store.plan.copy_bytes and size <= host_memory.available() // 2:
            with suppress(MemoryError):
                request.saved = export(self._store, request.kv, request.sequence.ids)

    def release(self, ids: Sequence[int], kv: SequenceKV, salt: str, keep_seconds: int = 0) -> None:
        """Release the sequence with tokens ids[:kv.length] to the prefix cache. Unless empty, it becomes `newest`.
        keep_seconds: see `PromptOptions`."""
        if kv.length:
            self.newest = StoredSequence(tuple(ids[: kv.length]), self._store.bytes_held(kv), salt)
        length, root, hashes = kv.length, kv.root, kv.hashes
        self._prefixes.release(kv, ids)
        if self._tiers is not None:
            self._tiers.keep_sequence(root, hashes, ids[:length], keep_seconds)
