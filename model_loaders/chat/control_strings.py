"""Hides control strings in messages, so that they stay text while the template's own become control tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

# Unicode's noncharacters, and then the private planes: a text always lacks one of them.
_INTERNAL = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlMarker:
    """Marks control strings in a text, and edges of the text that could complete one."""

    def __init__(self, control: tuple[str, ...]) -> None:
        self._control = control
        self._anywhere = re.compile(f"(?=(?:{'|'.join(map(re.escape, control)) or '(?!)'}))(.)", re.DOTALL)
        self._heads = {string[:n] for string in control for n in range(1, len(string))}
        self._tails = {string[n:] for string in control for n in range(1, len(string))}
        self._longest = max(map(len, control), default=0)

    def break_up(self, text: str, mark: str) -> str:
        """`text` with a mark after the first character of every control string."""
        return self._anywhere.sub(rf"\1{mark}", text)

    def hide_all(self, value: Any, mark: str) -> Any:
        """A copy of a JSON value with the control strings of all its strings hidden."""
        if isinstance(value, str):
            return self.hide(value, mark)
        if isinstance(value, Mapping):  # names and types get no marks at their edges: templates compare them
            return {
                self.break_up(name, mark): self.break_up(inner, mark)
                if name == "type" and isinstance(inner, str)
                else self.hide_all(inner, mark)
                for name, inner in value.items()
            }
        return [self.hide_all(inner, mark) for inner in value] if isinstance(value, (list, tuple)) else value

    def hide(self, text: str, mark: str) -> str:
        """`break_up`, with a mark at each edge where the template's text could complete a control string.

        White space at the edges stays outside the marks, so that a template can trim it.
        """
        body = text.strip()
        reach = range(1, min(len(body), self._longest) + 1)
        is_within = len(body) <= self._longest and any(body in string for string in self._control)
        opens = is_within or any(body[:n] in self._tails for n in reach)
        closes = is_within or any(body[len(body) - n :] in self._heads for n in reach)
        if not body or not (opens or closes):
            return self.break_up(text, mark)
        start = text.index(body)
        marked_body = (mark if opens else "") + self.break_up(body, mark) + (mark if closes else "")
        return text[:start] + marked_body + text[start + len(body) :]


marker_of = lru_cache(maxsize=4)(ControlMarker)


def unused_characters(count: int, texts: list[str]) -> list[str]:
    """`count` characters that occur in none of `texts`."""
    characters_used = set().union(*texts)
    free_characters = (chr(code) for code in chain(*_INTERNAL) if chr(code) not in characters_used)
    return [next(free_characters) for _ in range(count)]
