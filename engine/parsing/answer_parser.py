"""Splits the text of an answer into reasoning, text and tool calls while it is generated.

White space around tags and calls is not part of the text. Text that may begin a tag or a call is held back until more
text shows what it is, so the parts do not depend on how the text is cut into chunks.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from polarlm.engine.parsing.argument_readers import FieldArguments, JsonArguments, QuotedArguments
from polarlm.engine.parsing.foreign_calls import CLOSE, OPEN, ForeignCall, calls_in_tags, may_be_calls, whole_calls
from polarlm.engine.parsing.pieces import CallStart, Piece
from polarlm.engine.sampling.detokenizer import overlap
from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.reasoning import Tags

_ID_CHARACTERS = string.ascii_letters + string.digits
_LONGEST_ID = 64
_LONGEST_HEAD = 64  # characters that tell what an answer is, with a function's name
_LONGEST_FENCE = 16  # characters of a line that tell whether it begins or ends a block of code


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
        """format: how calls are written; None if there are none. names: the functions that may be called; in a mapping
        with the schemas of their parameters, which tell strings from other values. control: as for `CallFormat.marker`.
        tags: the tags around reasoning. thinks: whether the prompt ends with the opening tag.
        """
        self.hear: Callable[[str], None] = lambda text: None  # see `sampling.detokenizer.Parser`
        self._format, self._tags = format, tags
        self._functions: Mapping[str, Any] = names if isinstance(names, Mapping) else dict.fromkeys(names)
        self._marker = "" if format is None else format.marker(control)
        # Tags of another family's calls, which nothing else here begins with; empty if there are none.
        self._foreign = OPEN if self._functions and self._marker and OPEN not in self._marker else ""
        self._state = self._reasoning if thinks else self._start if tags else self._text
        self._pending = ""  # text that is not yet known to be text, reasoning or a call
        self._call_start = ""  # the text of a call whose name is not complete
        self._space = ""  # white space at the end of the text so far
        self._trims = False  # whether white space at the beginning of the following text is dropped
        self._clean = True  # whether all of the answer so far is white space
        self._may_be_calls = bool(
            self._functions and self._marker
        )  # whether the whole text may be another family's calls
        self._is_held = False  # whether it is known to begin with one
        self._line = ""  # the beginning of the last line of the text so far
        self._fences = 0  # lines before it that begin or end a block of code
        self._reader: JsonArguments | QuotedArguments | FieldArguments = JsonArguments()
        self.calls = 0  # calls that have begun
        self.is_cut_off = False  # at the end of the answer: whether it ends inside a call

    @property
    def held(self) -> int:
        """How many characters are not known to be text, reasoning or a call."""
        return len(self._call_start) + len(self._pending)

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
        if self._state == self._whole and (calls := whole_calls(pending, self._functions)):
            return self._foreign_calls(calls)
        if self._state == self._in_tags and (calls := calls_in_tags(pending.removeprefix(OPEN), self._functions)):
            return self._foreign_calls(calls)
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
        if self._may_be_calls and self._pending.strip():
            self._state = self._whole
            return []
        at, tags_at = self._pending.find(self._marker), self._find_tags()
        if tags_at >= 0 and not 0 <= at < tags_at:
            self._state = self._in_tags
            return self._say(tags_at) or []
        if at < 0:
            held = max(overlap(self._pending, marker) for marker in (self._marker, self._foreign) if marker)
            return self._say(len(self._pending) - held)
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
            begins = [f"{opening}{name}{format.middle[0]}" for name in self._functions]
        if (self._clean or self._trims) and not self.calls:
            if any(map(text.startswith, begins)):
                self._begin_call(text, opening)
                return []
            if any(begin.startswith(text) for begin in begins):
                return None
        return self._say(len(self._pending))

    def _whole(self) -> list[Piece] | None:
        """State: where all of the text may be calls of another family's form, and is held to the end of the answer."""
        if self._is_held or may_be_calls(self._pending.lstrip(), self._functions):
            self._is_held = len(self._pending) > _LONGEST_HEAD + max(map(len, self._functions))
            return None
        self._may_be_calls, self._state = False, self._text
        return []

    def _find_tags(self) -> int:
        """Where a line begins with another family's tag, outside of blocks of code; -1 if none does."""
        at = self._pending.find(self._foreign) if self._foreign else -1
        while at >= 0:
            *lines, line = (self._line + self._pending[:at]).split("\n")
            if not line.strip() and (self._fences + _fences(lines)) % 2 == 0:
                break
            at = self._pending.find(self._foreign, at + 1)
        return at

    def _in_tags(self) -> list[Piece] | None:
        """State: between another family's tags."""
        text, tag, rest = self._pending.removeprefix(OPEN).partition(CLOSE)
        if not tag:
            return None
        self._state = self._text
        calls = calls_in_tags(text, self._functions)
        if not calls:
            return self._say(len(OPEN))
        self._pending, self._trims, self._space = rest, True, ""
        return self._foreign_calls(calls)

    def _foreign_calls(self, calls: Sequence[ForeignCall]) -> list[Piece]:
        self._clean = self._may_be_calls = False
        pieces: list[Piece] = []
        for name, arguments in calls:
            pieces += [Piece(call=CallStart(self.calls, new_id(), name)), Piece(arguments=arguments)]
            self.calls += 1
        return pieces

    def _say(self, length: int) -> list[Piece] | None:
        """The parts of the first `length` pending characters, which are text; None if there are none."""
        text_said, self._pending = self._pending[:length], self._pending[length:]
        *lines, line = (self._line + text_said).split("\n")
        self._line, self._fences = line[:_LONGEST_FENCE], self._fences + _fences(lines)
        return list(self._text_pieces(text_said)) if text_said else None

    def _text_pieces(self, text: str) -> Iterator[Piece]:
        """A piece of `text` without the white space at its end, which is kept until more text follows."""
        if self._trims:
            text = text.lstrip()
        self.hear(text)
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._trims = self._clean = False
            yield Piece(body)

    def _begin_call(self, text: str, opening: str) -> None:
        self._call_start, self._pending, self._may_be_calls = opening, text[len(opening) :], False
        self._state = self._naming

    def _naming(self) -> list[Piece] | None:
        assert self._format is not None
        heads = [f"{name}{self._format.middle[0]}" for name in self._functions]
        if not any(self._pending.startswith(head) or head.startswith(self._pending) for head in heads):
            return self._no_call()
        (name, *id), rest = self._split_head()
        if rest is None:
            longest = max(map(len, self._functions), default=0) + _LONGEST_ID + sum(map(len, self._format.middle))
            return None if len(self._pending) <= longest else self._no_call()
        if not rest:
            return None
        fields, quote = self._format.fields, self._format.quote
        begins = ("{",) if fields is None else (fields.prefix, self._format.closing)
        if name not in self._functions or not any(rest.startswith(begin) for begin in begins):
            waits = name in self._functions and any(begin.startswith(rest) for begin in begins)
            return None if waits else self._no_call()
        self._pending, self._call_start, self._space = rest, "", ""
        if fields is not None:
            self._reader = FieldArguments(fields, self._format.closing, self._functions[name])
        else:
            self._reader = QuotedArguments(quote) if quote else JsonArguments()
        self._state = self._arguments
        start = CallStart(self.calls, self._format.call_id(name, id[0]) if id and id[0] else new_id(), name)
        self.calls += 1
        self._clean = False
        return [Piece(call=start)]

    def _split_head(self) -> tuple[list[str], str | None]:
        """The name, and the id if the format has one; the text from the arguments on, None if it is incomplete."""
        assert self._format is not None
        fields = self._format.fields
        begin = "{" if fields is None else fields.prefix[:1]
        parts: list[str] = []
        rest: str | None = self._pending
        for literal in self._format.middle:
            head, sign, tail = (rest or "").partition(literal or begin)
            parts.append(head)
            rest = (tail if literal else sign + tail) if sign and rest is not None else None
        return parts, rest

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
        following = format.separator(self.calls) + format.opening
        if self._pending.startswith(following):
            self._begin_call(self._pending, following)
            return []
        is_ended = format.end and self._pending.startswith(format.end)
        if not is_ended and any(literal.startswith(self._pending) for literal in (following, format.end) if literal):
            return None
        self._pending, self._state = self._pending.removeprefix(format.end), self._text
        return []


def _fences(lines: Iterable[str]) -> int:
    """How many of these lines begin or end a block of code."""
    return sum(line.lstrip().startswith("```") for line in lines)
