"""Incremental conversion of ids to text: whole characters only, up to the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from polarlm.model_loaders.tokenizers import Tokenizer


class Detokenizer:
    """Converts ids to text incrementally; bytes of an incomplete UTF-8 character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool, shown_tokens: Collection[int] = ()):
        """at_start: the text begins here, so a SentencePiece model's leading space is not part of it. shown_tokens:
        control tokens whose names are part of the text."""
        self._tokenizer = tokenizer
        names = tokenizer.control_tokens() if shown_tokens else {}
        self._names = {i: name.encode() for name, i in names.items() if i in shown_tokens}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = at_start and tokenizer.strips_leading_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        return self._text(b"".join([self._names.get(i) or self._tokenizer.token_bytes(i) for i in ids]), final=False)

    def finish(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text


class StopFilter:
    """Passes text up to the first complete stop string, and holds back a possible beginning of one.

    >>> stop = StopFilter(["END"])
    >>> stop.push("one E"), stop.push("N two"), stop.push(" END three"), stop.has_stopped
    ('one ', 'EN two', ' ', True)
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._pending = ""
        self.stopped_by: str | None = None

    @property
    def has_stopped(self) -> bool:
        return self.stopped_by is not None

    def push(self, text: str) -> str:
        if not self._stops:
            return text
        text = self._pending + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            # The stop string that is complete first, so that the result does not depend on how the text is split.
            _, at, self.stopped_by = min(matches)
            self._pending = ""
            return text[:at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that is still held back."""
        pending, self._pending = self._pending, ""
        return pending


def overlap(text: str, literal: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `literal`."""
    longest = min(len(text), len(literal) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(literal[:n])), 0)


def text_of(tokenizer: Tokenizer, ids: Iterable[int], *, control: bool = False) -> str:
    """The text of a sequence's ids. Raises ValueError for an unknown id. control: include the names of control tokens,
    so that `tokenize` with `control` turns the text into the same ids."""
    names = {i: name for name, i in tokenizer.control_tokens().items()} if control else {}
    text = ""
    for is_control, some in groupby(ids, names.__contains__):
        if is_control:
            text += "".join(names[i] for i in some)
            continue
        detokenizer = Detokenizer(tokenizer, at_start=not text)
        part = detokenizer.push(some) + detokenizer.finish()
        text += part.removeprefix(" ") if text and tokenizer.adds_space_after_control else part
    return text
