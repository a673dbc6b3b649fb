"""Reads the arguments of a call as JSON text while they are generated.

A reader's `push` takes the text that follows and returns (JSON text, the text after the arguments, or None if they go
on). The JSON text does not depend on how the text is cut into chunks.
"""

from __future__ import annotations

import json

from polarlm.engine.sampling.detokenizer import overlap

_CONSTANTS = {"None": "null", "True": "true", "False": "false"}  # as templates in Python's language may write them


class JsonArguments:
    """Arguments that are a JSON object: their text as it is."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> tuple[str, str | None]:
        for at, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[: at + 1], text[at + 1 :]
        return text, None


class QuotedArguments:
    """Arguments whose strings stand between quotes of the model's own: see `model_loaders.chat.call_arguments`."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._held = ""  # text that is not read yet
        self._open = ""  # the brackets that are open
        self._in_string = False
        self._word = ""  # a name, or a value that is no string, so far
        self._names = False  # whether a name is next

    def push(self, text: str) -> tuple[str, str | None]:
        self._held += text
        said = ""
        while self._held:
            if self._in_string:
                inside, ended, rest = self._held.partition(self._quote)
                keep = 0 if ended else overlap(inside, self._quote)
                self._held = rest if ended else inside[len(inside) - keep :]
                said += json.dumps(inside[: len(inside) - keep], ensure_ascii=False)[1:-1] + ('"' if ended else "")
                self._in_string = not ended
                if not ended:
                    break
            elif self._held.startswith(self._quote):
                self._held, self._in_string = self._held[len(self._quote) :], True
                said += '"'
            elif self._quote.startswith(self._held):
                break
            else:
                said += self._structure()
                if not self._open:
                    rest, self._held = self._held, ""
                    return said, rest
        return said, None

    def _structure(self) -> str:
        character, self._held = self._held[0], self._held[1:]
        if character not in (",{}[]:" if self._names else ",{}[]"):
            self._word += character
            return ""
        word = self._word.strip()
        self._word = ""
        said = _value(word) if word and character != ":" else json.dumps(word, ensure_ascii=False) if word else ""
        if character in "{[":
            self._open += character
        elif character in "}]":
            self._open = self._open[:-1]
        self._names = character in "{,}]" and self._open.endswith("{")
        return said + character


def _value(word: str) -> str:
    """A value without quotes as JSON: as it is, or as a string if it is none."""
    try:
        json.loads(word, parse_constant=int)  # which raises for NaN and infinity
    except ValueError:
        return _CONSTANTS.get(word) or json.dumps(word, ensure_ascii=False)
    return word
