"""Lets a server compute prompts, as `prompt_blocks` describes.

What arrives is searched as a tier is, so that all checks are a tier's; what does not arrive is computed here. The
server is given up if it says nothing for a while, or takes longer than this engine would.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any

from polarlm.engine.outputs import TierStatus
from polarlm.engine.storage.objects import DamagedObject, read_packed, unpack
from polarlm.engine.storage.tiers.patience import Patience
from polarlm.engine.storage.tiers.prompt_blocks import NAMES, NOTE
from polarlm.engine.storage.tiers.remote import BlockServer
from polarlm.engine.storage.tiers.search import Budget, Search, TierHit
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess
from polarlm.engine.storage.tiers.tier_store import CircuitBreaker, MemoryTier, TierQuery

_LOG = logging.getLogger(__name__)
_LABEL = "prefill-at"
_LEAST_BLOCKS = 2  # fewer are computed as fast as they are asked for
_CONNECT_SECONDS = 2.0
_SILENT_SECONDS = 10.0  # a server says something every second
_LEAST_SECONDS, _MOST_SECONDS = 5.0, 600.0  # for which a server may compute and send, however fast this engine is
_SUSPENSION = 30.0  # seconds for which a server that has failed is not asked
_MOST_MESSAGE = 2000  # characters of a server's error


class RemotePrefill:
    """The server at a URL that computes prompts. Raises ValueError for a URL that is not one of HTTP. settings: this
    engine's `identity.settings`. key: as for `BlockServer`."""

    def __init__(
        self, url: str, access: StoreAccess, settings: Mapping[str, str], patience: Patience, key: str | None = None
    ):
        self._url, self._server = url, BlockServer(url, key)
        self._access, self._settings, self._patience = access, settings, patience
        self._budget = Budget()
        self._limit = access.payloads.most_object_bytes
        self._suspended_until = 0.0
        self._failures = self._damaged = 0
        self._reason = ""  # of the last failure; empty after a success

    def status(self) -> TierStatus:
        return TierStatus(_LABEL, None, None, self._damaged, 0, self._failures, 0)

    def fetch(self, ids: Sequence[int], salt: str, cache_salt: str, found: int) -> Generator[int, None, TierHit | None]:
        """Let the server compute a prompt unless the store lacks few of its blocks. Yields how many tokens it has
        computed, and returns what has arrived; None if nothing has. found: tokens that tiers have."""
        search = Search(self._access, self._budget, NAMES, ids, salt)
        missing, n = search.missing_tokens() - found, self._access.store.shape.block_size
        if missing < _LEAST_BLOCKS * n or time.monotonic() < self._suspended_until:
            return None
        arrived = CircuitBreaker(MemoryTier(sys.maxsize, _LABEL, self._url))
        question = {
            "model": self._settings["name"],
            "ids": list(ids),
            "first": search.first_missing(),
            "root": self._access.prefixes.hashes((), salt)[0].hex(),
            "settings": dict(self._settings),
            "cache_salt": cache_salt,
        }
        seconds, left = self._patience.prefill_seconds(missing), 2 * (len(ids) // n) + 1  # objects to come at most
        tokens, end = 0, time.monotonic() + (_MOST_SECONDS if seconds is None else max(_LEAST_SECONDS, seconds))
        try:
            with closing(self._objects(question)) as objects:
                for name, content in objects:
                    if name == NOTE:
                        header = unpack(name, content).header
                        if "error" in header:
                            raise OSError(str(header["error"])[:_MOST_MESSAGE])
                        yield (tokens := int(header.get("tokens", tokens)))
                    else:
                        arrived.write(name, content, memoryview(b""))
                        left -= 1
                    if time.monotonic() > end or left < 0:
                        raise TimeoutError("it takes longer than this engine would, or sends more than the prompt has")
        except (OSError, HTTPException, DamagedObject, KeyError, TypeError, ValueError) as error:
            self._failures += 1
            self._suspended_until = time.monotonic() + _SUSPENSION
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            if reason != self._reason:  # else it has been said
                _LOG.warning(
                    "%s has not computed a prompt, and is asked again after %d s: %s; what is missing is computed here",
                    self._url,
                    _SUSPENSION,
                    reason.rstrip("."),
                )
            self._reason = reason
        else:
            self._reason = ""
        hit = search.run(TierQuery([arrived]))
        self._damaged += arrived.status().damaged
        return hit

    def _objects(self, question: Mapping[str, Any]) -> Generator[tuple[bytes, bytes], None, None]:
        """Ask the server, and yield names and bytes of the objects that it sends. Raises OSError, HTTPException,
        ValueError or DamagedObject."""
        headers = {**self._server.headers, "Content-Type": "application/json"}
        with closing(self._server.connection(_CONNECT_SECONDS)) as connection:
            connection.connect()
            connection.sock.settimeout(_SILENT_SECONDS)
            connection.request("POST", f"{self._server.path}/blocks", json.dumps(question), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(_message(response))
            while (read := read_packed(response.read, self._limit)) is not None:
                yield read


def _message(response: HTTPResponse) -> str:
    """Return what a server says in place of blocks."""
    content = response.read(_MOST_MESSAGE)
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"it answered {response.status} {response.reason}"
