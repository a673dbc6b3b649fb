"""The number and length of windows that can be scored in a given time."""

from __future__ import annotations

from dataclasses import dataclass

LEAST, MOST = 512, 2048  # tokens of a window
_WANTED = 2  # windows; if there is time for more, they get longer first
_DOUBLES = 3000  # tokens of a window for which a token takes twice as long on average


@dataclass(frozen=True)
class Windows:
    """Windows of a text, and the seconds that scoring them is expected to take."""

    count: int
    length: int  # tokens
    seconds: float


def choose(seconds: float, token_seconds: float, text_tokens: int, max_context: int) -> Windows:
    """As many windows as there is time for, at least one, and the longest windows if there is time for two.

    token_seconds: seconds per token in a short window.
    """
    most = min(MOST, max_context, text_tokens)
    length = most
    while length > LEAST and seconds < _WANTED * window_seconds(token_seconds, length):
        length = max(LEAST, length // 2)
    return windows_of_length(length, seconds, token_seconds, text_tokens // length)


def windows_of_length(length: int, seconds: float, token_seconds: float, most: int) -> Windows:
    """As many windows of `length` tokens as there is time for; at least one, and `most` at most."""
    each = window_seconds(token_seconds, length)
    count = max(1, min(int(seconds / each), most))
    return Windows(count, length, count * each)


def window_seconds(token_seconds: float, length: int) -> float:
    """The expected seconds of a window of `length` tokens."""
    return token_seconds * length * (1 + length / _DOUBLES)
