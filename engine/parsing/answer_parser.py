"""Splits the text of an answer into reasoning, text and tool calls while it is generated.

White space around tags and calls is not part of the text. Text that may begin a tag or a call is held back until more
text shows what it is, so the parts do not depend on how the text is cut into chunks.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from polarlm.engine.parsing.argument_readers import FieldArguments, JsonArguments, QuotedArguments
from polarlm.engine.parsing.pieces import CallStart, Piece
from polarlm.engine.sampling.detokenizer import overlap
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.reasoning import Tags

_ID_CHARACTERS = string.ascii_letters + string.digits
_LONGEST_ID = 64


def new_id() -> str:
    """The id of a call: 9 letters and digits, the length that some templates insist on."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def shown_tokens(control: Mapping[str, int], tags: Tags | None, format: CallFormat | None) -> tuple[int, ...]:
    """The control tokens that a parser has to see in the text. control: name → id."""
    literals = [] if tags is None else [tags.open, tags.close]
    if format is not None:
        literals += [format.begin, format.opening, *format.middle, format.closing]
        literals += [format.call_separator, format.end, format.quote]
        if (fields := format.fields) is not None:
            literals += [fields.prefix, fields.joint, fields.suffix, fields.separator]
    return tuple(token for name, token in control.items() if any(name in literal for literal in literals))


class AnswerParser:
    def __init__(
        self,
        format: CallFormat | None = None,
        names: Collection[str] | Mapping[str, Any] = (),
        control: Collection[str] = (),
        tags: Tags | None = None,
        *,
        thinks: bool = False,
    ) -> None:
        """format: how calls are written; None if there are none. names: the functions that may be called, perhaps with
        the schemas of their parameters, which tell a text that is no string from one that is. control: as for
        `CallFormat.marker`. tags: the tags around reasoning. thinks: whether the prompt ends with the opening tag.
        """
        self._format, self._names, self._tags = format, frozenset(names), tags
        self._schemas = names if isinstance(names, Mapping) else {}
        self._marker = "" if format is None else format.marker(control)
        self._state = self._reasoning if thinks else self._start if tags else self._text
        self._pending = ""  # text that is not yet known to be text, reasoning or a call
        self._call_start = ""  # the text of a call whose name is not complete
        self._space = ""  # white space at the end of the text so far
        self._trims = False  # whether white space at the beginning of the following text is dropped
        self._clean = True  # whether all of the answer so far is white space
        self._reader: JsonArguments | QuotedArguments | FieldArguments = JsonArguments()
        self.calls = 0  # calls that have begun
        self.is_cut_off = False  # at the end of the answer: whether it ends inside a call

    def push(self, text: str) -> list[Piece]:
        self._pending += text
        parts: list[Piece] = []
        while (more := self._state()) is not None:
            parts += more
        return parts

    def finish(self, *, cut: bool = False, next: str = "") -> list[Piece]:
        """The remaining parts, without a call that has no whole name. cut: whether the model did not end the answer;
        what may begin a call then counts as a call. next: the stop string that the answer would have continued with."""
        pending, self._pending = self._pending, ""
        if self._state == self._reasoning:
            return self._reasoning_pieces(pending.rstrip())
        self.is_cut_off = self._state in (self._naming, self._arguments) or (cut and self._may_begin(pending, next))
        if self.is_cut_off or self._state in (self._closing, self._after_call):
            return []
        parts = list(self._text_pieces(pending))
        if self._space and not self._trims:
            parts.append(Piece(self._space))
        return parts

    def _may_begin(self, pending: str, next: str) -> bool:
        """Whether text that is held back could begin a call or open reasoning."""
        if self._state not in (self._start, self._text) or not pending.strip():
            return False
        openings = [self._tags.open] if self._tags is not None and self._state == self._start else []
        if self._format is not None:
            openings.append(self._format.begin + self._format.opening)
        text = pending.lstrip() + next
        return any(opening.lstrip().startswith(text) or text.startswith(opening.lstrip()) for opening in openings)

    # Each state is a method that returns the parts that it finds, or None if it needs more text.

    def _start(self) -> list[Piece] | None:
        assert self._tags is not None
        text = self._pending.lstrip()
        if text.startswith(self._tags.open):
            self._pending = text[len(self._tags.open) :]
            self._state = self._reasoning
        elif self._tags.open.startswith(text):
            return None
        else:
            self._state = self._text
        return []

    def _reasoning(self) -> list[Piece] | None:
        assert self._tags is not None
        head, tag, tail = self._pending.partition(self._tags.close)
        if tag:
            parts = self._reasoning_pieces(head.rstrip())
            self._pending, self._trims, self._clean, self._state = tail, True, False, self._text
            return parts
        keep = overlap(self._pending, self._tags.close)
        sure = self._pending[: len(self._pending) - keep].rstrip()
        self._pending = self._pending[len(sure) :]
        return self._reasoning_pieces(sure) or None

    def _reasoning_pieces(self, text: str) -> list[Piece]:
        if self._clean:
            text = text.lstrip()
            self._clean = not text
        return [Piece(reasoning=text)] if text else []

    def _text(self) -> list[Piece] | None:
        if self._format is None:
            return self._say(len(self._pending))
        opening = self._format.begin + self._format.opening
        if not self._marker:
            return self._text_or_json(opening)
        at = self._pending.find(self._marker)
        if at < 0:
            return self._say(len(self._pending) - overlap(self._pending, self._marker))
        rest = self._pending[at:]
        if rest.startswith(opening):
            parts = self._say(at) or []
            self._begin_call(rest, opening)
            return parts
        return self._say(at if opening.startswith(rest) else at + 1)

    def _text_or_json(self, opening: str) -> list[Piece] | None:
        """The parts if calls have no marker: then only the first text of an answer may be a call."""
        text, format = self._pending.lstrip(), self._format
        begins = [opening]
        if format is not None and format.fields is not None:  # names alone tell a list of calls from other lists
            begins = [f"{opening}{name}{format.middle[0]}" for name in self._names]
        if (self._clean or self._trims) and not self.calls:
            if any(map(text.startswith, begins)):
                self._begin_call(text, opening)
                return []
            if any(begin.startswith(text) for begin in begins):
                return None
        return self._say(len(self._pending))

    def _say(self, length: int) -> list[Piece] | None:
        """The parts of the beginning of what is held, which is text; None if the beginning is empty."""
        text_said, self._pending = self._pending[:length], self._pending[length:]
        return list(self._text_pieces(text_said)) if text_said else None

    def _text_pieces(self, text: str) -> Iterator[Piece]:
        """A piece of `text` without the white space at its end, which is kept until more text follows."""
        text = self._space + text
        if self._trims:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._trims = self._clean = False
            yield Piece(body)

    def _begin_call(self, text: str, opening: str) -> None:
        self._call_start, self._pending = opening, text[len(opening) :]
        self._state = self._naming

    def _naming(self) -> list[Piece] | None:
        assert self._format is not None
        heads = [f"{name}{self._format.middle[0]}" for name in self._names]
        if not any(self._pending.startswith(head) or head.startswith(self._pending) for head in heads):
            return self._no_call()
        name, *id, rest = self._split_head()
        if rest is None:
            longest = max(map(len, self._names), default=0) + _LONGEST_ID + sum(map(len, self._format.middle))
            return None if len(self._pending) <= longest else self._no_call()
        if not rest:
            return None
        fields, quote = self._format.fields, self._format.quote
        begins = ("{",) if fields is None else (fields.prefix, self._format.closing)
        if name not in self._names or not any(rest.startswith(begin) for begin in begins):
            waits = name in self._names and any(begin.startswith(rest) for begin in begins)
            return None if waits else self._no_call()
        self._pending, self._call_start, self._space = rest, "", ""
        if fields is not None:
            self._reader = FieldArguments(fields, self._format.closing, self._schemas.get(name))
        else:
            self._reader = QuotedArguments(quote) if quote else JsonArguments()
        self._state = self._arguments
        start = CallStart(self.calls, self._format.call_id(name, id[0]) if id and id[0] else new_id(), name)
        self.calls += 1
        self._clean = False
        return [Piece(call=start)]

    def _split_head(self) -> tuple[str | None, ...]:
        """(name, the id if the format has one, text from the arguments on); the last is None if it is incomplete."""
        assert self._format is not None
        fields = self._format.fields
        begin = "{" if fields is None else fields.prefix[:1]
        parts: list[str | None] = []
        rest: str | None = self._pending
        for literal in self._format.middle:
            head, sign, tail = (rest or "").partition(literal or begin)
            parts.append(head)
            rest = (tail if literal else sign + tail) if sign and rest is not None else None
        return (*parts, rest)

    def _no_call(self) -> list[Piece]:
        """The parts of what turned out not to be a call: its first character is text, and the rest is parsed again."""
        text, self._call_start = self._call_start + self._pending, ""
        self._pending, self._state = text[1:], self._text
        return list(self._text_pieces(text[:1]))

    def _arguments(self) -> list[Piece] | None:
        pending = self._pending
        if not pending:
            return None
        text_said, rest = self._reader.push(pending)
        self._pending = rest or ""
        if rest is not None:
            self._state = self._closing
        return [Piece(arguments=text_said)] if text_said else []

    def _closing(self) -> list[Piece] | None:
        assert self._format is not None
        closing = self._format.closing
        if closing.startswith(self._pending) and closing != self._pending:
            return None
        self._pending, self._state, self._trims = self._pending.removeprefix(closing), self._after_call, True
        return []

    def _after_call(self) -> list[Piece] | None:
        """State: after a call, where another call or the end of their list may follow."""
        format = self._format
        assert format is not None
        following = format.call_separator + format.opening
        if self._pending.startswith(following):
            self._begin_call(self._pending, following)
            return []
        is_ended = format.end and self._pending.startswith(format.end)
        if not is_ended and any(literal.startswith(self._pending) for literal in (following, format.end) if literal):
            return None
        self._pending, self._state = self._pending.removeprefix(format.end), self._text
        return []
