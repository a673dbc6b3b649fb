"""From a conversation to token ids, such that no message can inject control tokens.

Control strings of the template become control tokens; the same strings inside a message stay text. Both are text in
the template's output, so those in messages are marked beforehand with a character that Unicode reserves for internal
use and that the conversation does not contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from model_loaders.errors import LoadError
from model_loaders.templates import ChatTemplate
from model_loaders.tokenizers import Tokenizer

# Unicode's noncharacters, and then the private planes: a text always lacks one of them.
_INTERNAL = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class _Message:
    role: str
    content: str
    token_ids: tuple[int, ...] | None  # the generated ids, in place of those of `content`


def chat_ids(
    messages: Sequence[Mapping[str, object]],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    check: Callable[[str], None] | None = None,
) -> list[int]:
    """Ids of a conversation and of the prompt for an answer; with BOS where the model wants one.

    An assistant message may carry "token_ids", the ids it was generated as (a final end-of-generation id is left out:
    the template writes its own). They replace its content, after the ids that its prompt ended with, so that a
    conversation begins with all the ids of its previous turn. Where the template changes the content, other than white
    space at its edges, its text is used instead: templates of models that reason leave the reasoning out of earlier
    answers. `check` is called with the text before it is tokenized, and may raise.

    Raises ValueError for malformed messages, LoadError where the template fails.
    """
    checked = [_checked(message, index, tokenizer) for index, message in enumerate(_sequence(messages))]
    mark, edge = _unused_characters(2, [template.source, *(text for m in checked for text in (m.role, m.content))])
    parts = _Rendering(template, checked, _guard(tuple(tokenizer.control_tokens())), mark, edge).parts()
    if check is not None:
        check("".join(part for part in parts if isinstance(part, str)).replace(mark, ""))
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
    """Runs the template over messages whose control strings are hidden and whose token ids are known by number.

    An answer with ids is shown to the template in a frame of characters that occur nowhere else. Where the frame comes
    out whole, the ids replace it; a template that changes an answer breaks its frame.
    """

    def __init__(self, template: ChatTemplate, messages: list[_Message], guard: _Guard, mark: str, edge: str) -> None:
        self._template = template
        self._edge = edge
        self._ids = tuple(i for i, message in enumerate(messages) if message.token_ids is not None)
        self._roles = [guard.break_up(message.role, mark) for message in messages]
        self._contents = [guard.hide(message.content, mark) for message in messages]
        self._texts: dict[tuple[tuple[int, ...], int | None], str | LoadError] = {}  # by frames and number of messages

    def parts(self) -> list[str | int]:
        """The text, alternating with the numbers of the messages whose ids replace their content.

        The template's process is asked once where the template shows every answer as it is, in the same place behind
        its question: for the plain text, the framed one, and the prompt of the first answer.
        """
        if self._ids:
            self._render(((), None), (self._ids, None), ((), self._ids[0]))
        plain = self._text(())
        framed = self._ids
        while framed:
            text = self._text(framed)
            if parts := self._split(text, framed):
                # The frames may have changed what the template does. Without white space, which it cannot trim in one.
                unframed = "".join(self._contents[part] if isinstance(part, int) else part for part in parts)
                return self._as_prompted(parts) if _dense(unframed) == _dense(plain) else [plain]
            whole = tuple(i for i in framed if text.count(self._frame(i)) == 1)
            framed = whole if whole != framed else ()
        return [plain]

    def _frame(self, index: int) -> str:
        return f"{self._edge}{index}{self._edge}{self._contents[index]}{self._edge}"

    def _text(self, framed: tuple[int, ...], length: int | None = None) -> str:
        """The messages as the template writes them, or the first `length`, with these in frames. Raises LoadError."""
        if (framed, length) not in self._texts:
            self._render((framed, length))
        if isinstance(text := self._texts[framed, length], LoadError):
            raise text
        return text

    def _render(self, *wanted: tuple[tuple[int, ...], int | None]) -> None:
        """Render each choice of frames and number of messages, in one request to the template's process."""
        conversations = [
            [
                {"role": role, "content": self._frame(i) if i in framed else content}
                for i, (role, content) in enumerate(zip(self._roles[:length], self._contents, strict=False))
            ]
            for framed, length in wanted
        ]
        self._texts |= zip(wanted, self._template.render_each(conversations), strict=True)

    def _split(self, text: str, framed: tuple[int, ...]) -> list[str | int] | None:
        """`text` split at these frames, alternating with their numbers; None if any is missing, broken or misplaced."""
        parts: list[str | int] = []
        for index in framed:
            before, found, text = text.partition(self._frame(index))
            if not found:
                return None
            parts += [before, index]
        parts.append(text)
        return None if any(self._edge in part for part in parts if isinstance(part, str)) else parts

    def _as_prompted(self, parts: list[str | int]) -> list[str | int]:
        """`parts` with the text before each answer as it was in the prompt for that answer.

        Templates write white space before a past answer that its prompt did not have ("Assistant: Hi" for
        "Assistant:"), or leave out what the prompt opened for it ("<think>"). The text between question and answer is
        mostly the same throughout, and then rendered once.
        """
        asked: dict[str, str] = {}  # text of the prompt, by the text in `parts`
        for position in range(1, len(parts), 2):
            before, index = parts[position - 1], parts[position]
            assert isinstance(before, str)
            assert isinstance(index, int)
            question = self._contents[index - 1].strip() if index else ""
            start = before.rfind(question) + len(question) if question and question in before else 0
            between = before[start:]
            if between not in asked:
                asked[between] = self._prompt(before, index, parts[1:position:2])[start:]
            parts[position - 1] = before[:start] + asked[between]
        return parts

    def _prompt(self, before: str, index: int, earlier: list[str | int]) -> str:
        """The text of the prompt for answer `index`, after the `earlier` ones; `before` where the template has none."""
        framed = tuple(i for i in earlier if isinstance(i, int))
        try:
            prompt = self._split(self._text(framed, index), framed)
        except LoadError:  # a template need not accept the beginning of a conversation
            return before
        asked = prompt[-1] if prompt else None
        return asked if isinstance(asked, str) and asked.startswith(before.rstrip()) else before


def _dense(text: str) -> str:
    """`text` without its white space."""
    return "".join(text.split())


class _Guard:
    """Marks every place of a text where a control string is, or where its edge could complete one."""

    def __init__(self, control: tuple[str, ...]) -> None:
        self._control = control
        self._anywhere = re.compile(f"(?=(?:{'|'.join(map(re.escape, control)) or '(?!)'}))(.)", re.DOTALL)
        self._heads = {string[:n] for string in control for n in range(1, len(string))}
        self._tails = {string[n:] for string in control for n in range(1, len(string))}
        self._longest = max(map(len, control), default=0)

    def break_up(self, text: str, mark: str) -> str:
        """`text` with a mark after the first character of every control string."""
        return self._anywhere.sub(rf"\1{mark}", text)

    def hide(self, text: str, mark: str) -> str:
        """`break_up`, and a mark at an edge where the template's text could complete a control string.

        White space at the edges stays outside the marks, so that a template can trim it.
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
def _guard(control: tuple[str, ...]) -> _Guard:
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
            raise ValueError(f"messages[{index}].{field} must be a string.")
    return _Message(message["role"], message["content"], _checked_ids(message, index, tokenizer))


def _checked_ids(message: Mapping[str, object], index: int, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    ids = message.get("token_ids")
    if ids is None or message["role"] != "assistant":
        return None
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"messages[{index}].token_ids must be a list of token ids.")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < tokenizer.vocab_size:
            raise ValueError(f"messages[{index}].token_ids has {token_id!r}, which is not a token of this model.")
    return tuple(ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids)
