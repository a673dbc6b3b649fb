"""How long a request waits for tiers: half of the time that its prefill would take, estimated from recent ones."""

from __future__ import annotations

_FIRST = 0.5  # seconds, while no prefill has been measured
_FIRST_PER_TOKEN = 0.0005  # seconds to add for each token then
_LEAST = 0.1  # seconds: on a busy machine, a thread needs a while to start
_MOST = 30.0  # seconds: a tier may hang, however slow prefill is
_MEASURED = 64  # least tokens of a prefill that is measured: the time of shorter ones hardly depends on their number
_REMEMBERED = 512  # tokens of earlier prefills that count in addition to the newest one


class Patience:
    """Estimates waiting times from the wall time of recent prefills, so that they are longer on a busy machine."""

    def __init__(self) -> None:
        self._measured = 0.0, 0.0  # tokens, seconds

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a prefill of `tokens` tokens."""
        if tokens >= _MEASURED:
            known, took = self._measured
            share = min(1.0, _REMEMBERED / max(known, 1.0))
            self._measured = tokens + share * known, seconds + share * took

    def seconds(self, tokens: int) -> float:
        """Return how many seconds to wait for tiers that may have `tokens` tokens: 0.1 to 30."""
        known, took = self._measured
        wanted = 0.5 * tokens * took / known if known else _FIRST + _FIRST_PER_TOKEN * tokens
        return min(_MOST, max(_LEAST, wanted))
