"""Polyfills for chat templates: adapts a conversation that a template refuses, or of which it silently drops a text.

Templates refuse system messages that are not the first one, or all of them, two messages of a role in a row, and more.
Whether a template takes a conversation is found by rendering it with words in place of its texts: all words must
appear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, Protocol

from polarlm.model_loaders.chat.call_format import CallFormat
from polarlm.model_loaders.chat.channels import Channels
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.recent import Recent

Messages = list[dict[str, Any]]

_SYSTEM = ("system", "developer")
_WORD = re.compile(r"alpha\d+text")  # in place of a text
_REPEATS = re.compile(r"(.{1,8}?)\1{3,}", re.DOTALL)
MOST_SHAPES = 256  # conversation shapes whose changes are kept
_LOST_TEXT = "this model's chat template leaves out the text of a message"
_UNKNOWN = (
    "this model's chat template writes calls of tools in a form that is not known here: tools are listed, and calls "
    "written, in a general form, for which the model may not have been trained"
)


class Template(Protocol):
    """The part of a `ChatTemplate` that is used here."""

    changes: Recent[str, tuple[int, bool]]
    """Shape of a conversation → the changes that it needs, and whether a text is lost in spite of them."""

    @property
    def calls(self) -> CallFormat: ...
    @property
    def channels(self) -> Channels | None: ...
    def render_each(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], **variables: object
    ) -> list[str | LoadError]: ...


@dataclass(frozen=True)
class AdaptedConversation:
    """A conversation as a template takes it: `messages`, and `variables` with the tools.

    warnings: a sentence for each kind of change. A message that was joined or cut has lost its field "number".
    """

    messages: Messages
    variables: dict[str, Any]
    warnings: list[str]


def adapt_conversation(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> AdaptedConversation:
    """`messages` as the template takes them: unchanged, or with the least harmful changes that lose no text.

    messages: as `checked_messages` returns them. Late system texts stay late, so that a longer conversation begins as
    it did. A conversation that the template refuses in spite of all changes stays as it is. Raises LoadError if the
    template takes too much time or memory.
    """
    format, with_tools = None, dict(variables)
    if tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        format = template.calls
        if shown_tools := format.as_tools(tools):
            with_tools["tools"] = shown_tools

    def adapt(messages: Sequence[Mapping[str, Any]], choice: int) -> Messages:
        adapted_messages = [dict(message) for message in messages]
        as_text = format is not None and (not format.is_native or choice & _AS_TEXT)
        if format is not None and as_text:
            adapted_messages = _calls_as_text(adapted_messages, () if format.is_native else tools, format)
        for bit, (change, _) in enumerate(_CHANGES):
            adapted_messages = change(adapted_messages) if choice >> bit & 1 else adapted_messages
        return adapted_messages if format is None or as_text else format.as_messages(adapted_messages)

    kept_indices, shapes = _shorten(messages)
    shape = json.dumps([shapes, bool(tools), dict(variables)])
    choice_needed = template.changes.get(shape)
    if choice_needed is None:
        trial, words = _trial(
            [messages[at] for at in kept_indices], checks_call_texts=format is None or template.channels is None
        )
        choice_needed = _choose_changes(template, lambda choice: adapt(trial, choice), words, with_tools)
        template.changes.put(shape, choice_needed)
    choice, is_lost = choice_needed
    reasons = [why for bit, (_, why) in enumerate(_CHANGES) if choice >> bit & 1] + [_CALLS] * (choice >= _AS_TEXT)
    warnings = [f"this model's chat template refuses {why}" for why in reasons] + [_LOST_TEXT] * is_lost
    warnings += [_UNKNOWN] * (format is not None and format.is_unknown)
    return AdaptedConversation(adapt(messages, choice), with_tools, warnings)


def _choose_changes(
    template: Template, adapt: Callable[[int], Messages], words: Sequence[str], variables: Mapping[str, Any]
) -> tuple[int, bool]:
    """The least harmful choice of changes with which the fewest words are lost, and whether one is."""
    attempts: list[Messages] = []
    best, least = 0, len(words) + 1
    for choice in range(2 * _AS_TEXT):
        adapted_messages = adapt(choice)
        if adapted_messages in attempts:
            continue
        attempts.append(adapted_messages)
        (text,) = template.render_each([adapted_messages], **variables)
        lost_words = len(words) + 1 if not isinstance(text, str) else len({*words}.difference(_WORD.findall(text)))
        if lost_words < least:
            best, least = choice, lost_words
        if not lost_words:
            break
    return best, 0 < least <= len(words)


def _shorten(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[list[object]]]:
    """The indices of all messages except rounds that repeat, and for each message what templates look at apart from its
    text."""
    shapes = [[one["role"], bool(one["content"].strip()), len(_calls(one))] for one in messages]
    letters: dict[str, str] = {}
    letters_text = "".join(letters.setdefault(str(shape), chr(len(letters))) for shape in shapes)
    is_kept = [True] * len(messages)
    for repeat in _REPEATS.finditer(letters_text):
        rounds = len(repeat[0]) // len(repeat[1])
        start = repeat.start() + len(repeat[1]) * (2 + rounds % 2)  # an even number of rounds stays even
        is_kept[start : repeat.end()] = [False] * (repeat.end() - start)
    kept_indices = [at for at, is_kept_here in enumerate(is_kept) if is_kept_here]
    return kept_indices, [shapes[at] for at in kept_indices]


def _trial(messages: Sequence[Mapping[str, Any]], *, checks_call_texts: bool) -> tuple[Messages, list[str]]:
    """`messages` with words in place of texts, and the words that must appear.

    checks_call_texts: whether a text next to calls must appear. Templates with channels leave it out of earlier turns,
    as they leave out reasoning.
    """
    trial, words = [], []
    for at, message in enumerate(messages):
        fields = dict(message)
        if fields["content"].strip():
            fields["content"] = f"alpha{at}text"
            words += [fields["content"]] if checks_call_texts or not _calls(fields) else []
        if fields.get("reasoning_content"):
            fields["reasoning_content"] = "thought"
        if calls := _calls(fields):
            fields["tool_calls"] = [{**one, "function": {**one["function"], "arguments": "{}"}} for one in calls]
        trial.append(fields)
    return trial, words


# -- changes, the least harmful first, in the order in which they are made --------------------------------------------


def _join_system_messages(messages: Messages) -> Messages:
    leading = list(takewhile(_is_system, messages))
    later = [_without_number(m, role="user") if _is_system(m) else m for m in messages[len(leading) :]]
    if len(leading) > 1 or (leading and leading[0]["role"] != "system"):
        leading = [{"role": "system", "content": _join(m["content"] for m in leading)}]
    return leading + later


def _join_neighbours(messages: Messages) -> Messages:
    """No two messages of the user, or of the assistant, in a row; a call ends a message."""
    changed_messages: Messages = []
    for message in messages:
        last = changed_messages[-1] if changed_messages else {}
        if message["role"] not in ("user", "assistant") or last.get("role") != message["role"] or _calls(last):
            changed_messages.append(message)
            continue
        pair = last, message
        joint_message = _without_number({**last, **message}, content=_join(m["content"] for m in pair))
        if thoughts := _join(m.get("reasoning_content") for m in pair):
            joint_message["reasoning_content"] = thoughts
        changed_messages[-1] = joint_message
    return changed_messages


def _split_calls(messages: Messages) -> Messages:
    changed_messages: Messages = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(_calls(message)) < 2:
            changed_messages.append(message)
            continue
        results = list(takewhile(lambda one: one["role"] == "tool", messages[at:]))
        at += len(results)
        for number, call in enumerate(message["tool_calls"]):
            changed_messages.append(_without_number(message, tool_calls=[call], **({"content": ""} if number else {})))
            ids = [one.get("tool_call_id", call["id"]) for one in results]
            own_result = ids.index(call["id"]) if call["id"] in ids else None
            changed_messages += [] if own_result is None else [results.pop(own_result)]
        changed_messages += results
    return changed_messages


def _separate_calls(messages: Messages) -> Messages:
    changed_messages: Messages = []
    for message in messages:
        if message["content"] and _calls(message):
            changed_messages.append(
                {name: value for name, value in _without_number(message).items() if name != "tool_calls"}
            )
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        changed_messages.append(message)
    return changed_messages


def _alternate(messages: Messages) -> Messages:
    """User and assistant take turns, for which empty messages stand; a call and its results belong to the answer."""
    changed_messages: Messages = []
    user_spoke = False  # whether the user has spoken since the last answer
    for message in messages:
        role = message["role"]
        if role in ("user", "assistant"):
            if user_spoke is (role == "user"):
                changed_messages.append({"role": "assistant" if user_spoke else "user", "content": ""})
            user_spoke = role == "user" or bool(_calls(message))
        changed_messages.append(message)
    return changed_messages


def _fill_empty(messages: Messages) -> Messages:
    return [one if one["content"] or _calls(one) else _without_number(one, content=" ") for one in messages]


def _merge_system_into_user(messages: Messages) -> Messages:
    if not messages or not _is_system(messages[0]):
        return messages
    first, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [_without_number(first, role="user"), *rest]
    return [_without_number(rest[0], content=_join(m["content"] for m in (first, rest[0]))), *rest[1:]]


_CHANGES: Sequence[tuple[Callable[[Messages], Messages], str]] = (
    (_join_system_messages, "system messages after the first one: they are joined to it, or put as the user's"),
    (_join_neighbours, "two messages of a role in a row: they are joined"),
    (_split_calls, "several calls of tools at a time: each is put before its result"),
    (_separate_calls, "text beside calls of tools: it is put as a message before them"),
    (_alternate, "messages out of turn: empty ones are put between them"),
    (_fill_empty, "messages without text: a space is put there"),
    (_merge_system_into_user, "system messages: the text is put before the user's first message"),
)
_AS_TEXT = 1 << len(_CHANGES)  # calls and results become text
_CALLS = "these calls of tools and their results: they are put as text"


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in _SYSTEM


def _calls(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return message.get("tool_calls") or ()


def _join(texts: Iterable[str | None]) -> str:
    return "\n\n".join(filter(None, texts))


def _without_number(message: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**message, **changes}.items() if name != "number"}


# -- calls as text -----------------------------------------------------------------------------------------------------

_TEXT = (
    "You can call these functions. Each line describes one of them in JSON:\n{tools}\n"
    "To call a function, write its name and its arguments as JSON in tags:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{}}}}\n</tool_call>\n'
    "The next message has the result. Call none if you need none."
)


def _calls_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    format: CallFormat,
) -> list[dict[str, Any]]:
    """Messages of text alone: a system message lists the tools, calls follow an answer's text, results are a user's."""
    changed_messages: list[dict[str, Any]] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            changed_messages.append({"role": "user", "content": "\n".join(results)})
            continue
        for message in group:
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            if calls := _calls(message):
                functions = [call["function"] for call in calls]
                calls_text = format.write_calls(
                    (one["name"], format.rewrite(one["arguments"]), "") for one in functions
                )
                plain["content"] = "\n".join(filter(None, (message["content"], calls_text)))
            changed_messages.append(plain)
    if not tools:
        return changed_messages
    tool_lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TEXT.format(tools=tool_lines)
    if changed_messages[0]["role"] == "system":
        return [
            {**changed_messages[0], "content": f"{changed_messages[0]['content']}\n\n{text}"},
            *changed_messages[1:],
        ]
    return [{"role": "system", "content": text}, *changed_messages]
