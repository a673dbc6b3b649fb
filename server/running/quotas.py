"""How much of their limits for a minute the keys of clients have left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from polarlm.engine.errors import counted
from polarlm.server.running.refusals import Refusal

_MINUTE = 60.0
_ROUNDING = 1e-9  # of what is used


class Quotas:
    """A limit comes back evenly: of 60 requests a minute, one each second, up to 60. Tokens are known when they are
    computed, so that a key may exceed its limit, and waits the longer. Only the event loop calls it."""

    def __init__(
        self, limits_of: Callable[[str], Mapping[str, int]], now: Callable[[], float] = time.monotonic
    ) -> None:
        """limits_of: see `Keys`."""
        self._limits_of, self._now = limits_of, now
        self._used: dict[tuple[str, str], tuple[float, float]] = {}  # by key and kind: what is used, and at which time

    def begin(self, name: str | None) -> None:
        """Count a request of the key `name`. Raises Refusal ("rate_limited") if one of its limits is used up."""
        if not name:
            return
        limits = self._limits_of(name)
        for kind, limit in limits.items():
            if kind == "priority":
                continue
            least = 1 if kind == "requests" else _ROUNDING  # that must be left
            excess = self._use(name, kind, limit, 0) + least - limit
            if excess > _ROUNDING:
                allowed = counted(limit, kind.removesuffix("s"))
                seconds = max(1, math.ceil(round(excess * _MINUTE / limit, 6)))
                raise Refusal("rate_limited", f"The key {name} may have {allowed} a minute", seconds)
        if "requests" in limits:
            self._use(name, "requests", limits["requests"], 1)

    def charge(self, name: str | None, tokens: int) -> None:
        """Count tokens of a prompt or of an answer."""
        if name and tokens and (limit := self._limits_of(name).get("tokens")):
            self._use(name, "tokens", limit, tokens)

    def _use(self, name: str, kind: str, limit: int, count: int) -> float:
        """Add to what is used, and return it."""
        now = self._now()
        used, at = self._used.get((name, kind), (0.0, now))
        used = max(0.0, used - (now - at) * limit / _MINUTE) + count
        self._used[name, kind] = used, now
        return used
