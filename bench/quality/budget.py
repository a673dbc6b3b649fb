"""How much of a text can be scored in a given time."""

from __future__ import annotations

from dataclasses import dataclass

LEAST, MOST = 512, 2048  # tokens of a window
_WANTED = 2  # windows; longer ones if there is time for more
_DOUBLES = 3000  # tokens of a window after which a token takes twice as long


@dataclass(frozen=True)
class Windows:
    """Windows of a text, and the seconds that scoring them is expected to take."""

    count: int
    length: int  # tokens
    seconds: float


def choose(seconds: float, token_seconds: float, text_tokens: int, max_context: int) -> Windows:
    """The longest windows of which `seconds` suffice for two, and as many of them as it suffices for; one at least.

    token_seconds: of a token in a short window. text_tokens: of the text; windows are not longer, nor are there more.
    """
    most = min(MOST, max_context, text_tokens)
    length = most
    while length > LEAST and seconds < _WANTED * window_seconds(token_seconds, length):
        length = max(LEAST, length // 2)
    each = window_seconds(token_seconds, length)
    count = max(1, min(int(seconds / each), text_tokens // length))
    return Windows(count, length, count * each)


def window_seconds(token_seconds: float, length: int) -> float:
    """Expected seconds of a window of `length` tokens."""
    return token_seconds * length * (1 + length / _DOUBLES)
