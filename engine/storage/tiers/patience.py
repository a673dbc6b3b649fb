"""How long a request waits for blocks that are elsewhere."""

from __future__ import annotations

_DEFAULT_SECONDS = 0.5  # while no prefill has been measured
_DEFAULT_TOKEN_SECONDS = 0.0005  # to add for each token then
_LEAST_SECONDS = 0.1  # on a busy machine, a thread needs a while to start
_MOST_SECONDS = 30.0  # a tier may hang, however slow prefill is
_LEAST_TOKENS = 64  # of a prefill that is measured: the time of shorter ones hardly depends on their number
_EARLIER_TOKENS = 512  # of earlier prefills, which count in addition to the newest one


class Patience:
    """How long a request waits for tiers: half of the time that its prefill would take, estimated from the wall time of
    recent prefills, so that it is longer on a busy machine."""

    def __init__(self) -> None:
        self._prefills = 0.0, 0.0  # tokens and seconds of recent ones, the newest with the most weight

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record a prefill of `tokens` tokens."""
        if tokens >= _LEAST_TOKENS:
            earlier_tokens, earlier_seconds = self._prefills
            share = min(1.0, _EARLIER_TOKENS / max(earlier_tokens, 1.0))
            self._prefills = tokens + share * earlier_tokens, seconds + share * earlier_seconds

    def seconds(self, tokens: int) -> float:
        """Return how many seconds to wait for tiers that may have `tokens` tokens: 0.1 to 30."""
        earlier_tokens, earlier_seconds = self._prefills
        seconds = _DEFAULT_SECONDS + _DEFAULT_TOKEN_SECONDS * tokens
        if earlier_tokens:
            seconds = 0.5 * tokens * earlier_seconds / earlier_tokens
        return min(_MOST_SECONDS, max(_LEAST_SECONDS, seconds))
