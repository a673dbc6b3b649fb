"""Incremental conversion of ids to text: whole characters only, up to the first stop string in the answer's text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

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
    >>> stop.push("one E"), stop.push("N two"), stop.push(" END three"), stop.stopped_by
    ('one ', 'EN two', ' ', 'END')
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._pending = ""
        self.stopped_by: str | None = None

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._pending)

    def push(self, text: str, *, counts: bool = True) -> str:
        """The text that passes. counts: whether a stop string that `text` completes ends it."""
        if not self._stops:
            return text
        held, text = self.held, self._pending + text
        places = ((stop, text.find(stop, max(0, held - len(stop) + 1))) for stop in self._stops)
        matches = [(at + len(stop), at, stop) for stop, at in places if at >= 0]
        if counts and matches:
            # The stop string that is complete first, so that the result does not depend on how the text is split.
            _, at, self.stopped_by = min(matches)
            self._pending = ""
            return text[:at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]


class Parser(Protocol):
    """What tells the text of an answer from its reasoning, its calls and their tags."""

    hear: Callable[[str], None]
    """Called with each piece of the text as it stands in the answer. All of the answer behind it is held back then."""

    @property
    def held(self) -> int:
        """How many characters of the answer are held back, until more of them tell what they are."""

    def push(self, text: str) -> Any: ...

    def finish(self, *, cut: bool) -> Any: ...


class AnswerStops:
    """Passes an answer up to the first stop string in its text. No stop string is looked for in reasoning, calls and
    tags, or across them."""

    def __init__(self, stops: Sequence[str], parser: Parser, hidden: Mapping[int, str]) -> None:
        """parser: one for this answer alone, of which it hears. hidden: control tokens that the parser has to see and
        the answer does not show, with their names."""
        self._stops, self._parser, self._hidden = stops, parser, hidden
        parser.hear = self._hear
        self._filter = StopFilter(stops)  # of the text since the last call or reasoning
        self._waiting: list[str] = []  # characters that have not passed; "" for each of a hidden name
        # Places in the answer, in characters, with those of hidden names:
        self._end = 0  # of all that came
        self._text_end = 0  # of the text that was heard last
        self._passed = 0  # of what of that text the filter lets pass
        self._counts_from = 0  # a stop string that is complete up to here does not count

    @property
    def stopped_by(self) -> str | None:
        return self._filter.stopped_by

    def push(self, text: str, token: int | None = None, *, counts: bool = True) -> str:
        """The text that passes. token: whose text it is. counts: as for `StopFilter.push`."""
        name = "" if token is None else self._hidden.get(token, "")
        self._waiting += [*text, *[""] * len(name)]
        self._end += len(text) + len(name)
        self._counts_from = self._counts_from if counts else self._end
        self._parser.push(text + name)
        known = self._end - self._parser.held
        return self._pass(self._passed if known == self._text_end else known)

    def finish(self, *, cut: bool) -> str:
        """The text that is still held back. cut: whether the model did not end the answer."""
        self._parser.finish(cut=cut)
        return self._pass(self._end)

    def _hear(self, text: str) -> None:
        if self.stopped_by is not None:
            return
        start = self._end - self._parser.held - len(text)
        if start != self._text_end:
            self._filter = StopFilter(self._stops)
        free = min(len(text), max(0, self._counts_from - start))
        self._filter.push(text[:free], counts=False)
        self._passed, self._text_end = start + free - self._filter.held, start + len(text)
        self._passed += len(self._filter.push(text[free:]))

    def _pass(self, end: int) -> str:
        end = end if self.stopped_by is None else self._passed
        count = len(self._waiting) - (self._end - end)
        text = "".join(self._waiting[:count])
        del self._waiting[:count]
        return text


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
