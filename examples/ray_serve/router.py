"""Chooses the replica for a request: the one that has its conversation in the cache, unless it has too much to do."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class PrefixRouter(RequestRouter):
    """Sends calls with the same key, their first argument, to the same replica; those with an empty one to any.

    A key's replicas are ordered by a hash of both (rendezvous hashing). A new replica so takes over its share of the
    keys from all others and moves no other key, and the keys of one that goes are spread over those that are left.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes `slack`: requests that a replica may have more than the least busy one before others are better."""
        self._slack: int = kwargs.get("slack", 8)
        self._sent: Counter[ReplicaID] = Counter()  # requests of this process that have not ended
        self._lock = asyncio.Lock()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._sent[replica_id] = max(0, self._sent[replica_id] - 1)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, each a rank of its own, the best one first."""
        key = str(pending_request.args[0]) if pending_request is not None and pending_request.args else ""
        if pending_request is not None:  # otherwise Ray asks again without a pause where all replicas are full
            pending_request.routing_context.should_backoff = True
        async with self._lock:
            await asyncio.sleep(0)  # the request before this one is sent meanwhile, and counted
            requests = {replica.replica_id: self._requests(replica.replica_id) for replica in candidate_replicas}
        least = min(requests.values(), default=0)

        def place(replica: RunningReplica) -> tuple[int, bytes]:
            """The smaller, the better."""
            more = requests[replica.replica_id] - least
            if not key:
                return more, random.randbytes(8)
            both = f"{key} {replica.replica_id.unique_id}".encode()
            return max(0, more - self._slack), hashlib.blake2b(both, digest_size=8).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=place)]

    def _requests(self, replica_id: ReplicaID) -> int:
        """How many requests a replica has: those from here, or as many as it said, if these are more."""
        return max(self._sent[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)
