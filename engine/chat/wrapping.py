"""Lines of a streamed text that break between words."""

from __future__ import annotations

import re
from collections.abc import Callable

from prompt_toolkit.utils import get_cwidth

_PIECE = re.compile(r"\n|[^\S\n]*\S+|[^\S\n]+")  # a word comes with the spaces in front of it
_FENCE = "```"


class Wrapping:
    """Breaks lines between words at the width of the terminal. Holds a word back until it is complete; a line of code
    stays whole, and so does text in a script without spaces, which the terminal breaks at any character."""

    def __init__(self, width: Callable[[], int]) -> None:
        """width: the columns of the terminal now."""
        self._width = width
        self._pending = ""  # the beginning of a word
        self._column = 0
        self._line = ""  # what the line begins with
        self._in_code = False

    def feed(self, text: str) -> str:
        """What can be shown once `text` has come."""
        pieces = _PIECE.findall(self._pending + text)
        self._pending = pieces.pop() if pieces and self._waits(pieces[-1]) else ""
        return "".join(map(self._place, pieces))

    def _waits(self, piece: str) -> bool:
        return not (piece == "\n" or self._in_code or _is_wide(piece) or len(piece) > self._width())

    def _place(self, piece: str) -> str:
        """A piece, or a line break and its word if the word does not fit into the line."""
        if piece == "\n":
            self._in_code ^= self._line.lstrip().startswith(_FENCE)
            self._column, self._line = 0, ""
            return piece
        width, word = self._width(), piece.lstrip()
        self._line += piece if len(self._line) < width else ""
        is_code = self._in_code or self._line.lstrip().startswith(_FENCE)
        fits = self._column + get_cwidth(piece) <= width or len(word) > width
        if self._column and word and not (fits or is_code or _is_wide(piece)):
            piece, self._column = f"\n{word}", 0
        end = self._column + get_cwidth(piece)
        self._column = (end - 1) % width + 1 if end else 0
        return piece


def wrap(text: str, width: Callable[[], int]) -> str:
    """A whole text in lines. width: see `Wrapping`."""
    return Wrapping(width).feed(f"{text}\n")[:-1]


def _is_wide(piece: str) -> bool:
    return get_cwidth(piece) > len(piece)
