"""Chooses the replica for a request: the one that has its conversation in the cache, unless it has too much to do."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PrefixRouter(RequestRouter):
    """Sends calls with the same key, their first argument, to the same replica; those with an empty one to any.

    A key's replicas are ordered by a hash of both (rendezvous hashing). A new replica so takes over its share of the
    keys from all others and moves no other key, and the keys of one that goes are spread over those that are left.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes request_router_kwargs.

        slack: requests that a replica may have more than the least busy one before others are better.
        """
        self._slack: int = kwargs.get("slack", 8)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, each a rank of its own, the best one first."""
        key = str(pending_request.args[0]) if pending_request is not None and pending_request.args else ""
        requests = {replica.replica_id: self._requests(replica) for replica in candidate_replicas}
        least = min(requests.values(), default=0)

        def place(replica: RunningReplica) -> tuple[int, bytes]:
            """The smaller, the better."""
            more = requests[replica.replica_id] - least
            if not key:
                return more, random.randbytes(8)
            both = f"{key} {replica.replica_id.unique_id}".encode()
            return max(0, more - self._slack), hashlib.blake2b(both, digest_size=8).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=place)]

    def _requests(self, replica: RunningReplica) -> int:
        """How many requests a replica has, as far as this process knows."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
