"""Puts a conversation otherwise where its chat template refuses it, or leaves out a text of it in silence.

Templates refuse system messages that are not the first one, or all of them, two messages of a role in a row, and more.
Whether one takes a conversation shows a rendering of it with words in place of its texts: all of them must appear.
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
_LOST = "this model's chat template leaves out the text of a message"
_UNKNOWN = (
    "this model's chat template writes calls of tools in a form that is not known here: tools are listed, and calls "
    "written, in a general form, for which the model may not have been trained"
)


class Template(Protocol):
    """What is used of a `ChatTemplate`."""

    changes: Recent[str, tuple[int, bool]]
    """By the shape of a conversation: the changes that it needs, and whether a text is lost even so."""

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
    it did. A conversation that the template refuses however it is put stays as it is. Raises LoadError if the template
    takes too much time or memory.
    """
    format, with_tools = None, dict(variables)
    if tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        format = template.calls
        if shown_tools := format.as_tools(tools):
            with_tools["tools"] = shown_tools

    def put(messages: Sequence[Mapping[str, Any]], choice: int) -> Messages:
        shown = [dict(message) for message in messages]
        as_text = format is not None and (not format.native or choice & _AS_TEXT)
        if format is not None and as_text:
            shown = _calls_as_text(shown, () if format.native else tools, format)
        for bit, (change, _) in enumerate(_CHANGES):
            shown = change(shown) if choice >> bit & 1 else shown
        return shown if format is None or as_text else format.as_messages(shown)

    kept, shapes = _brief(messages)
    shape = json.dumps([shapes, bool(tools), dict(variables)])
    needed = template.changes.get(shape)
    if needed is None:
        trial, words = _trial([messages[at] for at in kept], beside_calls=format is None or template.channels is None)
        needed = _needed(template, lambda choice: put(trial, choice), words, with_tools)
        template.changes.put(shape, needed)
    choice, is_lost = needed
    refused = [why for bit, (_, why) in enumerate(_CHANGES) if choice >> bit & 1] + [_CALLS] * (choice >= _AS_TEXT)
    warnings = [f"this model's chat template refuses {why}" for why in refused] + [_LOST] * is_lost
    warnings += [_UNKNOWN] * (format is not None and format.unknown)
    return AdaptedConversation(put(messages, choice), with_tools, warnings)


def _needed(
    template: Template, put: Callable[[int], Messages], words: Sequence[str], variables: Mapping[str, Any]
) -> tuple[int, bool]:
    """The least harmful choice of changes with which the fewest words are lost, and whether one is."""
    tried: list[Messages] = []
    best, least = 0, len(words) + 1
    for choice in range(2 * _AS_TEXT):
        shown = put(choice)
        if shown in tried:
            continue
        tried.append(shown)
        (text,) = template.render_each([shown], **variables)
        lost = len(words) + 1 if not isinstance(text, str) else len({*words}.difference(_WORD.findall(text)))
        if lost < least:
            best, least = choice, lost
        if not lost:
            break
    return best, 0 < least <= len(words)


def _brief(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[list[object]]]:
    """The places of all messages but rounds that repeat, and what templates look at in each besides texts."""
    shapes = [[one["role"], bool(one["content"].strip()), len(_calls(one))] for one in messages]
    letters: dict[str, str] = {}
    written = "".join(letters.setdefault(str(shape), chr(len(letters))) for shape in shapes)
    is_kept = [True] * len(messages)
    for repeat in _REPEATS.finditer(written):
        rounds = len(repeat[0]) // len(repeat[1])
        cut = range(repeat.start() + len(repeat[1]) * (2 + rounds % 2), repeat.end())  # what is even stays even
        is_kept[cut.start : cut.stop] = [False] * len(cut)
    kept = [at for at, stays in enumerate(is_kept) if stays]
    return kept, [shapes[at] for at in kept]


def _trial(messages: Sequence[Mapping[str, Any]], *, beside_calls: bool) -> tuple[Messages, list[str]]:
    """`messages` with words in place of texts, and the words that must appear.

    beside_calls: whether a text beside calls must appear. Templates of channels leave it out of earlier turns, as they
    do with reasoning.
    """
    trial, words = [], []
    for at, message in enumerate(messages):
        shown = dict(message)
        if shown["content"].strip():
            shown["content"] = f"alpha{at}text"
            words += [shown["content"]] if beside_calls or not _calls(shown) else []
        if shown.get("reasoning_content"):
            shown["reasoning_content"] = "thought"
        if calls := _calls(shown):
            shown["tool_calls"] = [{**one, "function": {**one["function"], "arguments": "{}"}} for one in calls]
        trial.append(shown)
    return trial, words


# -- changes, the least harmful first, in the order in which they are made --------------------------------------------


def _one_system(messages: Messages) -> Messages:
    leading = list(takewhile(_is_system, messages))
    later = [_without_number(m, role="user") if _is_system(m) else m for m in messages[len(leading) :]]
    if len(leading) > 1 or (leading and leading[0]["role"] != "system"):
        leading = [{"role": "system", "content": _joined(m["content"] for m in leading)}]
    return leading + later


def _neighbours_joined(messages: Messages) -> Messages:
    """No two messages of the user, or of the assistant, in a row; a call ends a message."""
    said: Messages = []
    for message in messages:
        before = said[-1] if said else {}
        if message["role"] not in ("user", "assistant") or before.get("role") != message["role"] or _calls(before):
            said.append(message)
            continue
        both = before, message
        joined = _without_number({**before, **message}, content=_joined(m["content"] for m in both))
        if thoughts := _joined(m.get("reasoning_content") for m in both):
            joined["reasoning_content"] = thoughts
        said[-1] = joined
    return said


def _one_call(messages: Messages) -> Messages:
    said: Messages = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(_calls(message)) < 2:
            said.append(message)
            continue
        results = list(takewhile(lambda one: one["role"] == "tool", messages[at:]))
        at += len(results)
        for number, call in enumerate(message["tool_calls"]):
            said.append(_without_number(message, tool_calls=[call], **({"content": ""} if number else {})))
            ids = [one.get("tool_call_id", call["id"]) for one in results]
            mine = ids.index(call["id"]) if call["id"] in ids else None
            said += [] if mine is None else [results.pop(mine)]
        said += results
    return said


def _calls_apart(messages: Messages) -> Messages:
    said: Messages = []
    for message in messages:
        if message["content"] and _calls(message):
            said.append({name: value for name, value in _without_number(message).items() if name != "tool_calls"})
            message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        said.append(message)
    return said


def _turns(messages: Messages) -> Messages:
    """User and assistant take turns, for which empty messages stand; a call and its results belong to the answer."""
    said: Messages = []
    asked = False  # whether the user has spoken since the last answer
    for message in messages:
        role = message["role"]
        if role in ("user", "assistant"):
            if asked is (role == "user"):
                said.append({"role": "assistant" if asked else "user", "content": ""})
            asked = role == "user" or bool(_calls(message))
        said.append(message)
    return said


def _no_empty(messages: Messages) -> Messages:
    return [one if one["content"] or _calls(one) else _without_number(one, content=" ") for one in messages]


def _no_system(messages: Messages) -> Messages:
    if not messages or not _is_system(messages[0]):
        return messages
    first, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [_without_number(first, role="user"), *rest]
    return [_without_number(rest[0], content=_joined(m["content"] for m in (first, rest[0]))), *rest[1:]]


_CHANGES: Sequence[tuple[Callable[[Messages], Messages], str]] = (
    (_one_system, "system messages after the first one: they are joined to it, or put as the user's"),
    (_neighbours_joined, "two messages of a role in a row: they are joined"),
    (_one_call, "several calls of tools at a time: each is put before its result"),
    (_calls_apart, "text beside calls of tools: it is put as a message before them"),
    (_turns, "messages out of turn: empty ones are put between them"),
    (_no_empty, "messages without text: a space is put there"),
    (_no_system, "system messages: the text is put before the user's first message"),
)
_AS_TEXT = 1 << len(_CHANGES)  # calls and results become text
_CALLS = "these calls of tools and their results: they are put as text"


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in _SYSTEM


def _calls(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return message.get("tool_calls") or ()


def _joined(texts: Iterable[str | None]) -> str:
    return "\n\n".join(filter(None, texts))


def _without_number(message: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    return {name: value for name, value in {**message, **changed}.items() if name != "number"}


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
    said: list[dict[str, Any]] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            said.append({"role": "user", "content": "\n".join(results)})
            continue
        for message in group:
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            if calls := _calls(message):
                functions = [call["function"] for call in calls]
                written = format.shown((one["name"], format.as_written(one["arguments"]), "") for one in functions)
                plain["content"] = "\n".join(filter(None, (message["content"], written)))
            said.append(plain)
    if not tools:
        return said
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TEXT.format(tools=listed)
    if said[0]["role"] == "system":
        return [{**said[0], "content": f"{said[0]['content']}\n\n{text}"}, *said[1:]]
    return [{"role": "system", "content": text}, *said]
