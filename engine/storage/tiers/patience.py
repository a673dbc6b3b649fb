"""How long a request waits for places: half as long as computing would take, by what it has taken lately."""

from __future__ import annotations

_FIRST = 0.5  # seconds, before anything was measured
_FIRST_PER_TOKEN = 0.0005  # and for each token
_LEAST = 0.1  # seconds: a thread takes a while to begin on a busy machine
_MOST = 30.0  # seconds: for a place that hangs, however slow computing is
_MEASURED = 64  # tokens of a prefill at least: a shorter one takes as long as one of a few more
_REMEMBERED = 512  # tokens of earlier prefills that count beside the newest one


class Patience:
    """Knows the recent speed of prefills in seconds of wall time, so that it grows where the machine is busy."""

    def __init__(self) -> None:
        self._measured = 0.0, 0.0  # tokens, seconds

    def computed(self, tokens: int, seconds: float) -> None:
        """Note a prefill of so many tokens."""
        if tokens >= _MEASURED:
            known, took = self._measured
            share = min(1.0, _REMEMBERED / max(known, 1.0))
            self._measured = tokens + share * known, seconds + share * took

    def seconds(self, tokens: int) -> float:
        """How long to wait for places that may have so many tokens: 0.1 to 30 seconds."""
        known, took = self._measured
        wanted = 0.5 * tokens * took / known if known else _FIRST + _FIRST_PER_TOKEN * tokens
        return min(_MOST, max(_LEAST, wanted))
