"""From a conversation to token ids, such that what people write never steers the model.

Control strings of the template become control tokens; the same strings inside a message stay text. Both are text when
the template has run, so what the messages bring along is marked beforehand with a character that Unicode reserves for
such internal use and that nothing else in the conversation contains.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from model_loaders.errors import LoadError
from model_loaders.templates import ChatTemplate
from model_loaders.tokenizers import Tokenizer

# Unicode's noncharacters; after them the private planes, so that there is always one more that a text does not have.
_INTERNAL = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class _Message:
    role: str
    content: str
    token_ids: tuple[int, ...] | None  # what the engine generated, to stand for `content`


def chat_ids(messages: Sequence[Mapping[str, object]], template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Ids of a conversation, ending where the assistant is to write; with BOS where the model wants one.

    An assistant message may carry "token_ids", the ids it was generated as (a final end-of-generation id is left out:
    the template writes its own). They are put in the place of its content as they are, after the very ids that its
    prompt ended with, so that a conversation begins with all the ids of its previous turn. Where the template does
    not show the content as it is, the text is used instead.

    Raises ValueError for messages of a wrong form, LoadError where the template fails.
    """
    checked = [_checked(message, index, tokenizer) for index, message in enumerate(_sequence(messages))]
    mark, hole = _unused_characters(2, [template.source, *(text for m in checked for text in (m.role, m.content))])
    parts = _Rendering(template, _Guard.of(tokenizer), mark, hole).parts(checked)
    ids: list[int] = []
    for position, part in enumerate(parts):
        if isinstance(part, str):
            ids += tokenizer.tokenize(part, control=True, continued=position > 0, mark=mark)
        else:
            ids += checked[part].token_ids or ()
    if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


class _Rendering:
    """Runs the template over messages whose control strings are hidden and whose token ids are left as holes."""

    def __init__(self, template: ChatTemplate, guard: _Guard, mark: str, hole: str) -> None:
        self._template = template
        self._guard = guard
        self._mark = mark
        self._hole = hole

    def parts(self, messages: list[_Message]) -> list[str | int]:
        """The text, alternating with the numbers of messages whose ids belong in between."""
        while True:
            given = [self._given(message, index) for index, message in enumerate(messages)]
            parts = self._rendered(given)
            expected = [i for i, message in enumerate(messages) if message.token_ids is not None]
            if parts[1::2] == expected:
                break
            # The template dropped, repeated or moved a message: its text goes through as any other's.
            lost = [i for i in expected if parts[1::2].count(i) != 1] or expected
            messages = [replace(m, token_ids=None) if i in lost else m for i, m in enumerate(messages)]
        for position in range(1, len(parts), 2):
            parts[position - 1] = self._as_prompted(given, parts, position)
        return parts

    def _as_prompted(self, given: list[dict[str, str]], parts: list[str | int], position: int) -> str | int:
        """The text before a hole, as it was when the model was asked to fill it.

        Templates write a past message with other white space than they ask for a new one ("Assistant: Hi" after
        "Assistant:"), or leave out what they opened for it ("<think>"). Such differences give way to what was there.
        """
        before, index = parts[position - 1], parts[position]
        assert isinstance(before, str)
        assert isinstance(index, int)
        try:
            prompt = self._rendered(given[:index])
        except LoadError:  # a template need not accept the beginning of a conversation
            return before
        same_past = prompt[1::2] == parts[1:position:2]
        asked = prompt[-1]
        return asked if same_past and isinstance(asked, str) and asked.startswith(before.rstrip()) else before

    def _given(self, message: _Message, index: int) -> dict[str, str]:
        """A message as the template sees it."""
        is_hole = message.token_ids is not None
        return {
            "role": self._guard.break_up(message.role, self._mark),
            "content": f"{self._hole}{index}{self._hole}" if is_hole else self._guard.hide(message.content, self._mark),
        }

    def _rendered(self, given: list[dict[str, str]]) -> list[str | int]:
        pieces = re.split(f"{self._hole}([0-9]+){self._hole}", self._template.render(given))
        return [int(piece) if position % 2 else piece for position, piece in enumerate(pieces)]


class _Guard:
    """Puts a mark into every place of a text where a control string is, or could come to be at its edges."""

    def __init__(self, control: tuple[str, ...]) -> None:
        self._control = control
        self._anywhere = re.compile(f"(?=(?:{'|'.join(map(re.escape, control)) or '(?!)'}))(.)", re.DOTALL)
        self._heads = {string[:n] for string in control for n in range(1, len(string))}
        self._tails = {string[n:] for string in control for n in range(1, len(string))}
        self._longest = max(map(len, control), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Guard:
        return _guard_of(tuple(tokenizer.control_tokens()))

    def break_up(self, text: str, mark: str) -> str:
        """Parts every control string in `text` after its first character."""
        return self._anywhere.sub(rf"\1{mark}", text)

    def hide(self, text: str, mark: str) -> str:
        """`break_up`, and a mark at an edge where the template's text could complete a control string.

        The marks are inside of white space at the edges, so that a template can still trim it.
        """
        body = text.strip()
        reach = range(1, min(len(body), self._longest) + 1)
        inside = len(body) <= self._longest and any(body in string for string in self._control)
        opens = inside or any(body[:n] in self._tails for n in reach)
        closes = inside or any(body[len(body) - n :] in self._heads for n in reach)
        if not body or not (opens or closes):
            return self.break_up(text, mark)
        start = text.index(body)
        marked = (mark if opens else "") + self.break_up(body, mark) + (mark if closes else "")
        return text[:start] + marked + text[start + len(body) :]


@lru_cache(maxsize=4)
def _guard_of(control: tuple[str, ...]) -> _Guard:
    return _Guard(control)


def _unused_characters(count: int, texts: list[str]) -> list[str]:
    used = set().union(*texts)
    unused = (chr(code) for code in chain(*_INTERNAL) if chr(code) not in used)
    return [next(unused) for _ in range(count)]


def _sequence(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError("messages must be a list with at least one message.")
    return messages


def _checked(message: object, index: int, tokenizer: Tokenizer) -> _Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{index}] must be an object with a role and a content.")
    for field in ("role", "content"):
        if not isinstance(message.get(field), str):
            raise ValueError(f"messages[{index}].{field} must be a text.")
    return _Message(message["role"], message["content"], _checked_ids(message, index, tokenizer))


def _checked_ids(message: Mapping[str, object], index: int, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    ids = message.get("token_ids")
    if ids is None or message["role"] != "assistant":
        return None
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"messages[{index}].token_ids must be a list of token ids.")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < tokenizer.vocab_size:
            raise ValueError(f"messages[{index}].token_ids has {token_id!r}, which is no token of this model.")
    return tuple(ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids)
