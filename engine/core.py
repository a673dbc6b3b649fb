"""What computes requests, whatever they ask for: a model's parts, its KV store, the queue and the lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from polarlm.engine.errors import EngineError
from polarlm.engine.loading.parts import Parts, fit_line, start_line
from polarlm.engine.model import score
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.outputs import CacheStats, ExpertStatus, Score, SnapshotStatus, Status
from polarlm.engine.requests.drafts import Drafting
from polarlm.engine.requests.encoding import EncoderRunner
from polarlm.engine.requests.fair_lock import FairLock
from polarlm.engine.requests.prompts import checked_ids
from polarlm.engine.requests.runner import Runner
from polarlm.engine.requests.scheduler import Scheduler, TokenSequence
from polarlm.engine.sampling.grammars import Grammars
from polarlm.engine.state.blocks import BlockAllocator
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.storage import identity
from polarlm.engine.storage.tiers.patience import Patience
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess
from polarlm.engine.storage.tiers.tiers import Tiers


class EngineCore:
    grammars: Grammars  # which compile constraints
    fingerprint = ""  # what stands for all that answers depend on, if they can be replayed

    def __init__(self, parts: Parts) -> None:
        self.config, self.model = parts.config, parts.source
        self.context, self.cache_shape = parts.plan.tokens, parts.plan.shape
        self.reads_images = parts.source.vision_encoder is not None  # whether messages may have images
        self._parts, self.expert_plan = parts, parts.experts
        self._start_line, self._fit_line = start_line(parts), fit_line(parts)
        self._model, self._store = parts.model, parts.model.store
        self._identity = identity.settings(parts.model, parts.source.name, replayable=parts.config.replayable)
        bits = parts.model.ops.input_bits
        self._prefixes = PrefixCache(
            self._store,
            identity.hash_root(self._identity, {} if bits == "16" else {"input_bits": bits}),
            enabled=parts.config.kept_sequences > 0,
            control_ids=parts.source.tokenizer.control_tokens().values(),
        )
        self._scheduler = Scheduler(parts.config.parallel, parts.plan.shape.block_size)
        self._drafting = Drafting(parts.config, parts.source.vocabulary.stop, parts.draft_model, parts.model.mtp)
        self._lock = FairLock(forkable=parts.model.ops.forkable)
        tiers, files = parts.tiers, sorted(parts.source.weights.files())
        access, patience = StoreAccess.to(self._store, self._prefixes), Patience()
        self._tiers = Tiers(access, tiers, files, self._lock, patience) if tiers else None
        kind = EncoderRunner if isinstance(self._model, Encoder) else Runner
        self._runner = kind(
            self._model, self._prefixes, self._scheduler, self._drafting, patience, self._tiers, parts.config.replayable
        )
        self._closing = ExitStack()  # what closes what prepares requests
        self._is_closed = False

    # -- computing ---------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Run one unit of work, a part of a prefill or a step of all running requests; False if there is no request."""
        with self._exclusive():
            is_busy = bool(self._runner.requests)
            self._runner.run_unit()
            return is_busy

    def warm_up(self) -> bool:
        """Record a part of what requests will compute, unless there are any; False once nothing is left to record."""
        with self._exclusive():
            return self._runner.warm_up(is_compiled=self._parts.is_compiled)

    def status(self) -> Status:
        """Counts of requests, blocks and threads."""
        with self._exclusive():
            groups, ops, draft = self._store.groups, self._model.ops, self._drafting.model
            counted = [group.quantized for group in groups if not group.is_sparse]
            sparse = [group.quantized for group in groups if group.is_sparse]
            (size, free, kept), (room, unused, known) = _counts(counted), _counts(sparse)
            running, threads = self._scheduler.running, ops.threads()
            cache = self._model.weights.expert_cache
            if threads is not None:
                draft_clauses = [] if draft is None else draft.store.numpy_fallbacks()
                clauses = [*self._store.numpy_fallbacks(), *(f"draft model: {clause}" for clause in draft_clauses)]
                threads = replace(threads, why="; ".join([threads.why, *clauses]))
            return Status(
                running=running,
                waiting=len(self._runner.requests) - running,
                prefilling=self._scheduler.prefilling,
                blocks=size,
                blocks_used=size - free,
                blocks_kept=kept,
                blocks_free=free - kept,
                threads=threads,
                backend=ops.backend,
                tiers=() if self._tiers is None else self._tiers.status(),
                experts=None if cache is None else ExpertStatus(cache.experts, cache.hits, cache.misses, cache.bytes),
                blocks_of_largest=max((blocks.size for blocks in counted), default=0),
                snapshots=SnapshotStatus(room, room - unused, known, self._store.plan.snapshot_bytes)
                if sparse
                else None,
            )

    def cache_stats(self) -> CacheStats:
        """Memory of the newest sequence in the KV store."""
        with self._exclusive():
            newest, shape, context = self._runner.newest, self.cache_shape, self.context
            return CacheStats(
                tokens=len(newest.ids),
                bytes=newest.bytes,
                bits_per_value=shape.bits_of_text(context),
                f16_bytes=shape.f16_bytes(len(newest.ids)),
                context=context,
                context_bytes=shape.sequence_bytes(context),
                context_f16_bytes=shape.f16_bytes(context),
            )

    def score(self, ids: Sequence[int], every_token_coded: bool = False, *, logits: bool = False) -> Score:
        """Teacher-forced log-probabilities of `ids` (T ≥ 2). Attention reads the cache as it does in steps.

        Earlier requests finish first. With `every_token_coded`, attention reads all tokens after the first block as
        codes, as engines do that keep no recent tokens. With `logits`, the score has all logits, 4·T·V bytes.
        """
        if self.model.config.is_encoder:
            raise EngineError(f"{self.model.name} is an embedding model: it has no probabilities of tokens")
        ids = checked_ids(ids, self.model, self.context, room=0)
        if len(ids) < 2:
            raise EngineError(f"score needs at least 2 token ids, not {len(ids)}")
        with self._exclusive():
            earlier_requests = set(self._runner.requests)
        while True:
            with self._exclusive():
                if earlier_requests.isdisjoint(self._runner.requests):
                    return score.score(self._model, ids, every_token_coded=every_token_coded, logits=logits)
                self._runner.run_unit()

    # -- requests and threads ----------------------------------------------------------------------------------

    def _cancel(self, sequence: TokenSequence) -> None:
        """Mark a request as cancelled unless it has finished. The next holder of the lock removes it, this thread if
        the lock is free: a generator in a reference cycle may be closed in the thread that holds the lock."""
        sequence.finish_reason = sequence.finish_reason or "cancelled"
        self._lock.if_free(self._sweep)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock.hold():
            self._enter()
            yield

    def _enter(self) -> None:
        """What every holder of the lock does first: check the engine, and remove cancelled requests."""
        self._check_open()
        self._runner.sweep()

    def _sweep(self) -> None:
        if not self._is_closed and not self._lock.lost:
            self._runner.sweep()

    def _check_open(self) -> None:
        """Raises EngineError: "closed" after `close`, "forked" in a child process that cannot use it; DeviceLost."""
        if self._is_closed:
            raise EngineError("The engine is closed", "closed")
        self._lock.check()
        self._runner.check()

    # -- memory ------------------------------------------------------------------------------------------------

    def start_line(self) -> str:
        """One short line for users: model, size, context, and what the cache saves at full context."""
        return self._start_line

    def fit_line(self) -> str:
        """One line for users: model, weights, KV store, and how many tokens fit."""
        return self._fit_line

    def __repr__(self) -> str:
        return f"<Engine {self._start_line}{', closed' if self._is_closed else ''}>"

    def close(self) -> None:
        """Free weights and KV store; unfinished requests and later calls raise EngineError. Closing twice is fine."""
        self._closing.close()
        with self._lock.hold():
            if self._is_closed or self._lock.lost:
                return
            self._is_closed = True
            self._runner.fail_all(EngineError("The engine was closed before this request finished", "closed"))
        if self._tiers is not None:
            self._tiers.close()
        with self._lock.hold():
            self._parts.close()
            del self._parts, self._model, self._store, self._prefixes, self._runner


def _counts(allocators: Sequence[BlockAllocator]) -> tuple[int, int, int]:
    """The numbers of all blocks, of blocks that no request holds, and of the latter that the cache can find."""
    return sum(one.size for one in allocators), sum(one.free for one in allocators), sum(one.kept for one in allocators)
