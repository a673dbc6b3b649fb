"""Turns a conversation into token ids so that no message can inject control tokens.

Control strings of the template become control tokens; the same strings inside a message stay text. The template's
output does not tell them apart, so those in messages are marked beforehand with a character that Unicode reserves for
internal use and that the conversation does not contain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from polarlm.model_loaders.chat.control_strings import ControlMarker, marker_of, unused_characters
from polarlm.model_loaders.chat.messages import Message, check_messages
from polarlm.model_loaders.chat.template_polyfills import adapt_conversation
from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.tokenizers import Tokenizer

_MOST_BETWEEN = 64  # characters between an answer's reasoning and its text


def chat_ids(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    check: Callable[[str], None] | None = None,
    warn: Callable[[str], None] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
    cut: Callable[[str], Sequence[str | Sequence[int]]] | None = None,
) -> list[int]:
    """The ids of a conversation and of the prompt for its next answer, with BOS if the model requires it.

    An assistant message may carry "token_ids", the ids it was generated as (a final end-of-generation id is left out:
    the template writes its own). They replace its content, after the ids that its prompt ended with, so that a
    conversation begins with all the ids of its previous turn. Where the template changes the content, other than white
    space at its edges, its text is used instead: templates of models that reason leave the reasoning out of earlier
    answers. With "tool_calls", the ids replace the calls as well, however the template writes their arguments; with
    "reasoned", they begin with reasoning.

    Messages may have OpenAI's further fields: "tool_calls", whose arguments are the text of a JSON object, or the
    beginning of one if the answer was cut off, "tool_call_id", "name" and "reasoning_content". tools: the functions
    that may be called, in OpenAI's form. variables: more variables of the template. `check` is called with the text
    before it is tokenized, and may raise; `warn` with a sentence for each kind of message that the template refuses and
    gets otherwise. cut: cuts the template's text into texts, and ids that stand there as they are.

    Raises ValueError for malformed messages, LoadError if the template fails.
    """
    chat_messages = check_messages(messages, tokenizer)
    numbered_messages = [{**message.fields, "number": number} for number, message in enumerate(chat_messages)]
    adapted_conversation = adapt_conversation(template, numbered_messages, tools, variables or {})
    for warning in adapted_conversation.warnings:
        if warn is not None:
            warn(warning)
    chat_messages, with_tools = (
        [_restore_ids(message, chat_messages) for message in adapted_conversation.messages],
        adapted_conversation.variables,
    )
    texts = json.dumps([[message.fields for message in chat_messages], with_tools], ensure_ascii=False)
    mark, edge = unused_characters(2, [template.source, texts])
    marker = marker_of(tuple(tokenizer.control_tokens()))
    parts = _Rendering(template, chat_messages, marker, mark, edge, marker.hide_all(with_tools, mark)).parts()
    if check is not None:
        check("".join(part for part in parts if isinstance(part, str)).replace(mark, ""))
    ids: list[int] = []
    for position, part in enumerate(parts):
        if isinstance(part, int):
            ids += chat_messages[part].token_ids or ()
            continue
        for number, piece in enumerate([part] if cut is None else cut(part)):
            if isinstance(piece, str):
                piece = tokenizer.tokenize(piece, control=True, continued=position > 0 or number > 0, mark=mark)
            ids += piece
    if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _restore_ids(fields: dict[str, Any], messages: list[Message]) -> Message:
    """A message as the template takes it, with the ids of the answer in `messages` that it still is."""
    number = fields.pop("number", None)
    if number is None or fields["role"] != "assistant":
        return Message(fields)
    message = messages[number]
    became_reasoning = bool(message.fields["content"]) and not fields["content"]
    return Message(fields, message.token_ids, message.has_reasoning or became_reasoning)


class _Rendering:
    """Runs the template over messages with hidden control strings, and finds the answers that token ids replace.

    The template gets an answer with ids in a frame of characters that occur nowhere else. If the frame is whole in the
    output, the ids replace it; a template that changes an answer breaks its frame. Calls and reasoning of an answer are
    framed as well: made-up ones stand for the calls and the reasoning that the ids hold.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[Message],
        marker: ControlMarker,
        mark: str,
        edge: str,
        variables: Mapping[str, Any],
    ) -> None:
        self._template = template
        self._variables = variables
        self._edge = edge
        self._ids = tuple(i for i, message in enumerate(messages) if message.token_ids is not None)
        self._turns = frozenset(i for i, message in enumerate(messages) if message.is_whole_turn)
        self._reasoning_turns = frozenset(i for i in self._turns if messages[i].has_reasoning)
        self._messages = [
            {
                **marker.hide_all(message.fields, mark),
                "role": marker.break_up(message.fields["role"], mark),
            }
            for message in messages
        ]
        self._contents: list[str] = [message["content"] or "" for message in self._messages]
        self._framed_messages = {index: self._frame(index) for index in self._ids}
        self._texts: dict[tuple[tuple[int, ...], int | None], str | LoadError] = {}  # by frames and number of messages

    def parts(self) -> list[str | int]:
        """The text, alternating with the indices of the messages whose ids replace their content.

        If the template keeps every answer unchanged, and writes the same text before each, its process is asked once:
        for the plain text, the framed text, and the prompt of the first answer.
        """
        if self._ids:
            self._render(((), None), (self._ids, None), ((), self._ids[0]))
        plain = self._text(())
        frames = self._ids
        while frames:
            text = self._text(frames)
            if parts := self._split(text, frames):
                # A template may write another text because of the frames.
                return self._with_prompts(parts) if self._is_plain(parts, plain) else [plain]
            whole = tuple(i for i in frames if self._find(text, i) is not None)
            frames = whole if whole != frames else ()
        return [plain]

    def _frame(self, index: int) -> tuple[dict[str, Any], list[str]]:
        """An answer in its frame, and the texts by which it is known in the output, in order.

        The names of calls stay: templates may show them next to results, too. Their arguments become made-up ones,
        which no other calls have.
        """

        def frame(part: str = "", text: str = "") -> str:
            return f"{self._edge}{index}{part}{self._edge}{text}"

        message, content = self._messages[index], frame(text=f"{self._contents[index]}{self._edge}")
        if index not in self._turns:
            return {**message, "content": content}, [content]
        framed_message, texts = dict(message), []
        if index in self._reasoning_turns:
            framed_message["reasoning_content"] = frame("r")
            texts.append(frame("r"))
        if message["content"]:
            framed_message["content"] = content
            texts.append(content)
        if calls := message.get("tool_calls"):
            format, framed_message["tool_calls"], calls_written = self._template.calls, [], []
            for number, call in enumerate(calls):
                arguments = {frame(f"c{number}"): 0}
                text, name = format.write(arguments), call["function"]["name"]
                function = {**call["function"], "arguments": text if format.arguments_as_text else arguments}
                framed_message["tool_calls"].append({**call, "function": function})
                calls_written.append((name, text, call["id"]))
            texts.append(format.write_calls(calls_written))
        return framed_message, texts

    def _find(self, text: str, index: int) -> tuple[int, int] | None:
        """(start, end) of an answer's frame in `text`; None unless it occurs once, with all of its parts in order."""
        parts, is_reasoned = self._framed_messages[index][1], index in self._reasoning_turns
        if len(parts) < 1 + is_reasoned or any(text.count(part) != 1 for part in parts):
            return None
        places = [(at, at + len(part)) for part, at in zip(parts, map(text.index, parts), strict=True)]
        gaps = [text[end:start] for (_, end), (start, _) in pairwise(places)]
        if places != sorted(places) or any(self._edge in gap or len(gap) > _MOST_BETWEEN for gap in gaps):
            return None
        start, end = places[0][0], places[-1][1]
        head, tags = text[:start].rstrip(), self._template.tags if is_reasoned else None
        return len(head) - len(tags.open) if tags is not None and head.endswith(tags.open) else start, end

    def _is_plain(self, parts: list[str | int], plain: str) -> bool:
        """Whether `parts` are `plain` split up; in place of answers with calls or reasoning, `plain` may have any text.

        White space does not count: the template cannot trim it inside a frame.
        """
        literals = [""]
        for part in parts:
            if isinstance(part, int) and part in self._turns:
                literals.append("")
            else:
                literals[-1] += _dense(self._contents[part] if isinstance(part, int) else part)
        first, *rest = literals
        text = _dense(plain)
        if not rest or not text.startswith(first):
            return text == first
        at = len(first)
        for literal in rest[:-1]:
            at = text.find(literal, at)
            if at < 0:
                return False
            at += len(literal)
        return text.endswith(rest[-1]) and len(text) - len(rest[-1]) >= at

    def _text(self, frames: tuple[int, ...], length: int | None = None) -> str:
        """The text of the first `length` messages (None: of all), with `frames` ones in frames. Raises LoadError."""
        if (frames, length) not in self._texts:
            self._render((frames, length))
        if isinstance(text := self._texts[frames, length], LoadError):
            raise text
        return text

    def _render(self, *keys: tuple[tuple[int, ...], int | None]) -> None:
        conversations = [
            [
                self._framed_messages[i][0] if i in frames else message
                for i, message in enumerate(self._messages[:length])
            ]
            for frames, length in keys
        ]
        self._texts |= zip(keys, self._template.render_each(conversations, **self._variables), strict=True)

    def _split(self, text: str, frames: tuple[int, ...]) -> list[str | int] | None:
        """`text` split at these frames, alternating with their indices; None if one is missing, broken or misplaced."""
        parts: list[str | int] = []
        for index in frames:
            place = self._find(text, index)
            if place is None:
                return None
            parts += [text[: place[0]], index]
            text = text[place[1] :]
        parts.append(text)
        return None if any(self._edge in part for part in parts if isinstance(part, str)) else parts

    def _with_prompts(self, parts: list[str | int]) -> list[str | int]:
        """`parts` with the text before each answer replaced by the end of the prompt for the answer.

        Before a past answer, templates write white space that its prompt did not have ("Assistant: Hi" for
        "Assistant:"), or leave out what the prompt opened for it ("<think>"). The text between question and answer is
        mostly the same throughout, and then rendered once.
        """
        prompt_texts: dict[str, str] = {}  # text between question and answer in `parts` → that text in the prompt
        for position in range(1, len(parts), 2):
            text_before, index = parts[position - 1], parts[position]
            assert isinstance(text_before, str)
            assert isinstance(index, int)
            question = self._contents[index - 1].strip() if index else ""
            start = text_before.rfind(question) + len(question) if question and question in text_before else 0
            text_between = text_before[start:]
            if text_between not in prompt_texts:
                prompt_texts[text_between] = self._prompt(text_before, index, parts[1:position:2])[start:]
            parts[position - 1] = text_before[:start] + prompt_texts[text_between]
        return parts

    def _prompt(self, text_before: str, index: int, earlier: list[str | int]) -> str:
        """The text of the prompt for answer `index`, after the `earlier` answers; `text_before` if it cannot be
        rendered."""
        frames = tuple(i for i in earlier if isinstance(i, int))
        try:
            prompt = self._split(self._text(frames, index), frames)
        except LoadError:  # a template need not accept the beginning of a conversation
            return text_before
        text = prompt[-1] if prompt else None
        return text if isinstance(text, str) and text.startswith(text_before.rstrip()) else text_before


def _dense(text: str) -> str:
    return "".join(text.split())
