"""What the store has of a prompt: its longest stored prefix, what tiers put back, what a preempted request saved."""

from __future__ import annotations

from polarlm.engine.requests.request import Request
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.state.requantize.blocks import Requantizer
from polarlm.engine.state.store import KVStore, SequenceKV
from polarlm.engine.storage.copies import restore


class Matcher:
    """Gives requests their sequences in the store."""

    def __init__(self, store: KVStore, prefixes: PrefixCache, requantizer: Requantizer) -> None:
        self._store, self._prefixes, self._requantizer = store, prefixes, requantizer

    def missing(self, request: Request) -> int | None:
        """Return how many tokens the store lacks of a request, whose prefix is matched now; None if it has to wait for
        blocks that are requantized or put back. Raises OutOfBlocks."""
        if request.kv is None:
            kept = 0 if request.saved is None else request.saved.length
            if request.hit is not None:
                kept += request.hit.tokens_left
            if kept and self._requantizer.must_wait(kept):
                return None
            if request.hit is not None and request.hit.put_back():
                return None  # the next unit puts back the next part
            request.kv = self._restored(request) or self._match(request)
            request.kv.adapter, request.kv.image_positions = request.adapter, request.image_positions
            if request.sequence.generated == 0:
                request.cached = request.kv.length
        missing = request.sequence.computable - request.kv.length
        waits = request.prefill is None and missing > 0 and self._requantizer.must_wait(missing)
        return None if waits else missing

    def _restored(self, request: Request) -> SequenceKV | None:
        if request.saved is None:
            return None
        kv = self._prefixes.set_salt(restore(self._store, request.saved), request.salt)
        request.saved = None
        return kv

    def _match(self, request: Request) -> SequenceKV:
        """Return the longest stored prefix of a request's tokens that it can continue from."""
        options = request.options
        ids = request.sequence.ids[:-1] if options.cache_prompt and not request.reads_prompt else ()
        kv = self._prefixes.match_prefix(ids, request.salt)
        if request.reproduces(kv.length):
            return kv
        self._prefixes.release(kv, ids)
        return self._prefixes.match_prefix(ids[: request.cached], request.salt)

    def unmatch(self, request: Request) -> None:
        """Let a matched request wait with nothing in the store."""
        if request.kv is not None:
            self._prefixes.release(request.kv, request.sequence.ids)
            request.kv = None

    def fits_in_a_step(self, request: Request) -> bool:
        """Whether what the store lacks of a prompt becomes rows of the request's first step: in the current block they
        see the same as in a prompt. Snapshots of recurrent layers, and readers, need a prompt."""
        assert request.kv is not None
        has_rows = request.sequence.max_tokens > 0 and not request.reads_prompt and not self._store.sparse_groups
        has_rows = has_rows and request.sequence.text_from <= request.kv.length
        return has_rows and 0 < len(request.sequence.prompt) - request.kv.length <= self._store.rows_of_block(
            request.kv
        )
