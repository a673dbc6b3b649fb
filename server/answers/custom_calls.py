"""Calls of custom tools: of functions with one parameter where the model writes them, of a text where clients do."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace

from polarlm.engine.parsing.pieces import Piece
from polarlm.server.reading.tools import INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters of a JSON string: the halves of one above U+FFFF belong together.
_CHARACTERS = re.compile(
    r"""(?: [^"\\] | \\[^u]
    | \\u (?: (?![dD][89abAB]) [0-9a-fA-F]{4} | [dD][89abAB].. (?: \\u[0-9a-fA-F]{4} | (?=[^\\] | \\[^u])) ) )*""",
    re.VERBOSE | re.DOTALL,
)


class CustomCalls:
    """Makes pieces with calls of custom tools of pieces with calls of functions."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._input: _Input | None = None  # of the last call, if it is a custom tool's

    def convert(self, piece: Piece) -> Piece:
        if piece.call is not None:
            self._input = _Input() if piece.call.name in self._names else None
        if self._input is None:
            return piece
        return replace(piece, is_custom=True, arguments=self._input.push(piece.arguments))


class _Input:
    """The text of the input in a call's arguments, JSON that comes in fragments. Of other JSON, which no grammar of
    calls has, the input is the JSON itself."""

    def __init__(self) -> None:
        self._pending = ""
        self._is_begun = self._is_other = False

    def push(self, fragment: str) -> str:
        self._pending += fragment
        if not self._is_begun:
            head = _HEAD.match(self._pending)
            if head is None and f'{{"{INPUT}":"'.startswith("".join(self._pending.split())):
                return ""
            self._is_begun, self._is_other = True, head is None
            self._pending = self._pending[head.end() if head else 0 :]
        characters = self._pending
        if not self._is_other and (match := _CHARACTERS.match(self._pending)) is not None:
            characters = match[0]
        self._pending = self._pending[len(characters) :]
        return characters if self._is_other else _decode(characters)


def _decode(characters: str) -> str:
    """The text of a part of a JSON string; without escapes that JSON does not have, and halves of characters."""
    characters = re.sub(r'\\([^"\\/bfnrtu])', r"\1", characters)
    text: str = json.loads(f'"{characters}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
