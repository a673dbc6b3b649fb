"""What computes requests, whatever they ask for: a model's parts, its KV store, the queue and the lock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from polarlm.engine.errors import EngineError
from polarlm.engine.loading.parts import Parts, fit_line, start_line
from polarlm.engine.model import score
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.outputs import CacheStats, Score, Status
from polarlm.engine.requests.drafts import Drafting
from polarlm.engine.requests.encoding import EncoderRunner
from polarlm.engine.requests.fair_lock import FairLock
from polarlm.engine.requests.prompts import checked_ids
from polarlm.engine.requests.runner import Runner
from polarlm.engine.requests.scheduler import Scheduler, TokenSequence
from polarlm.engine.sampling.grammars import Grammars
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
            return self._runner.status()

    def cache_stats(self) -> CacheStats:
        """Memory of the newest sequence in the KV store."""
        with self._exclusive():
            return self._runner.cache_stats()

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
