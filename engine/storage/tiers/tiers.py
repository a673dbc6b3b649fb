"""Tiers keep blocks after the KV store has reused their memory, for prompts that begin with the same tokens.

Blocks of a released sequence are written in the background (`writing.py`). The blocks of a new prompt are looked up and
read outside of the engine's lock, while the thread that submits it waits (`search.py`), and copied to the store when
its turn has come (`search.py`). A tier that does not answer in time is not queried again before it has answered;
until then, prompts are computed without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from polarlm.engine.outputs import TierStatus
from polarlm.engine.storage.tiers.names import ObjectNames, digest, stored_digest
from polarlm.engine.storage.tiers.opening import digest_folder
from polarlm.engine.storage.tiers.patience import Patience
from polarlm.engine.storage.tiers.query import Tier, TierQuery
from polarlm.engine.storage.tiers.search import Budget, Search, TierHit
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess
from polarlm.engine.storage.tiers.tier_store import TierStore
from polarlm.engine.storage.tiers.writing import Lock, TierWriter, WaitingBlocks
from polarlm.model_loaders.forks import renew_in_children

_LOG = logging.getLogger(__name__)
_NAMES_SECONDS = 0.5  # that a request waits for the weights' digest
_LAST_PATIENCE = 5.0  # seconds without progress after which a closing engine gives up

T = TypeVar("T")


class Tiers:
    """The tiers of an engine, and the threads that wait for them."""

    def __init__(
        self,
        access: StoreAccess,
        tiers: Sequence[TierStore],
        weights: Sequence[Path],
        lock: Lock,
        patience: Patience,
    ):
        """weights: the files of the model's weights. lock: the engine's."""
        self._access, self._block_size = access, access.store.shape.block_size
        self._tiers, self._budget = [Tier(tier) for tier in tiers], Budget()
        self._writer = TierWriter(WaitingBlocks(self._access), self._tiers, self._wait_for_names, lock)
        self._patience = patience
        self._root = access.prefixes.hashes(())[0]
        self._names: ObjectNames | None = None
        self._names_ready = threading.Event()
        self._late_thread: threading.Thread | None = None  # the one that still waits for a tier
        renew_in_children(self)
        self._cache = digest_folder()
        if (weights_digest := stored_digest(weights, self._cache)) is not None:
            self._set_names(weights_digest)
        else:
            threading.Thread(target=self._hash, args=(weights,), name="weights", daemon=True).start()

    def renew(self) -> None:
        """In a forked child, stop waiting for the weights' digest: the thread that computes it is the parent's."""
        self._names_ready = threading.Event()
        self._names_ready.set()

    def _hash(self, weights: Sequence[Path]) -> None:
        try:
            self._set_names(digest(weights, self._cache))
        except OSError as error:
            _LOG.warning("no blocks are kept: the weights cannot be identified: %s", error)
            self._names_ready.set()

    def _set_names(self, weights: bytes) -> None:
        self._names = ObjectNames(self._root, weights)
        self._names_ready.set()

    def _wait_for_names(self, seconds: float | None = None) -> ObjectNames | None:
        """Return the names when the weights have been hashed; None if that fails, or takes longer than `seconds`."""
        self._names_ready.wait(seconds)
        return self._names

    def status(self) -> tuple[TierStatus, ...]:
        return tuple(tier.status() for tier in self._tiers)

    # -- finding -----------------------------------------------------------------------------------------------

    def find(self, ids: Sequence[int], salt: str) -> TierHit | None:
        """Return the longest prefix of `ids` that tiers have and the store lacks; None on a miss or a timeout."""
        if len(ids) < self._block_size or (names := self._wait_for_names(_NAMES_SECONDS)) is None:
            return None
        search = Search(self._access, self._budget, names, ids, salt)
        return self._run_within(self._patience.seconds(search.missing_tokens()), search.run)

    def recall(self, keys: Sequence[bytes]) -> Mapping[bytes, Sequence[int]]:
        """Return the ids of the answers that tiers have, by the digests of their conversations."""
        if not keys or (names := self._wait_for_names(_NAMES_SECONDS)) is None:
            return {}
        tokens = len(keys) * self._block_size  # about so many tokens are computed if ids are missing

        def read(query: TierQuery) -> dict[bytes, Sequence[int]]:
            answers = {key: query.read(names.answer(key), lambda answer: answer.ids) for key in keys}
            return {key: answer.block.ids for key, answer in answers.items() if answer is not None}

        return self._run_within(self._patience.seconds(tokens), read) or {}

    def _run_within(self, seconds: float, work: Callable[[TierQuery], T]) -> T | None:
        """Return the result of `work`, which runs in a thread; None if it is late, or an earlier one still runs."""
        if self._late_thread is not None and self._late_thread.is_alive():
            return None
        query, results = TierQuery(self._tiers), list[T]()
        thread = threading.Thread(target=lambda: results.append(work(query)), name="tiers reading", daemon=True)
        with self._writer.pause():
            thread.start()
            thread.join(seconds)
        if not thread.is_alive():
            return results[0] if results else None
        self._late_thread = thread
        query.end().report_timeout(seconds)
        return None

    # -- keeping -----------------------------------------------------------------------------------------------

    def keep_sequence(self, root: bytes, hashes: Sequence[bytes], ids: Sequence[int], keep_seconds: int = 0) -> None:
        """Keep the blocks of a sequence that was released to the prefix cache. The caller holds the engine's lock.
        root: the root of its salt; empty for none. hashes: the hashes of its complete blocks. keep_seconds: see
        `PromptOptions`."""
        self._writer.keep_sequence(root or self._root, hashes, ids, keep_seconds)

    def keep_answer(self, key: bytes, ids: Sequence[int]) -> None:
        self._writer.keep_answer(key, ids)

    def close(self) -> None:
        """Write what has not been written, as long as there is progress. Afterwards nothing may be found or released.
        The engine's lock must be free."""
        self._wait_for_names(_LAST_PATIENCE)
        if not self._writer.close(_LAST_PATIENCE):
            _LOG.warning("not all blocks were kept: a tier does not accept them")
        del self._access  # so that the store can be freed
