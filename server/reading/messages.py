"""Reads a conversation in JSON, in the shapes of every API, into the messages that chat templates take.

Agents send their history with every turn, so a part of it that this server cannot use must not end the conversation: it
is written in another form, or left out with a warning. Media are refused only in what the user asks now. A reference to
an item is refused, too: without the model's own turns the conversation would be another one. Later parts do not change
how a part is written, so that a prompt begins with the prompt of the turn before. Results are the exception: a result
goes to its call, unless an answer was begun without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from polarlm.server.reading.edits import compact, is_summary, summary_in
from polarlm.server.reading.parts import (
    CALLED_WITH,
    REASONING,
    Losses,
    image_in,
    is_image,
    is_reasoning,
    kind_of,
    list_kinds,
    reasoning_in,
    text_of_part,
)
from polarlm.server.reading.tools import in_namespace
from polarlm.server.reading.values import BadRequest, FieldWarnings, array, describe, mapping, text, wrong_value

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles that clients may use, and their names in templates."""

_FOREIGN_ROLES = {"human": "user", "ai": "assistant", "model": "assistant"}  # what other programs call them

_RESULT_ROLES = ("tool", "function")  # the second is OpenAI's, before there were tools
_UNSAFE_CHARACTERS = re.compile(r"[^\w.:/-]+")  # characters of a name that could end it in a template
_LONGEST_NAME = 128
_MOST_OPEN = 128  # calls of an answer that may get results

Message = dict[str, Any]
Piece = str | Message  # a text, or an image: {"type": "image", "image": bytes}


def read_messages(history: Any, field_warnings: FieldWarnings, *, reads_images: bool = False) -> list[Message]:
    """The messages in an array of messages and items. field_warnings: gets the field, and a sentence for each kind of
    thing that is left out or changed. reads_images: whether the model does. Raises BadRequest."""
    question = _question(array("messages", history, "an array with at least one message", 1))
    reader = _Reader(reads_images)
    try:
        for index, one in enumerate(history):
            reader.read(f"messages[{index}]", one, is_question=index == question, is_last=index == len(history) - 1)
    except RecursionError:
        raise BadRequest("messages", "messages is nested too deeply") from None
    sentences = reader.warnings()
    field_warnings += [("messages", sentence) for sentence in sentences]
    if not (messages := reader.messages()):
        raise BadRequest("messages", ": ".join(("messages has nothing to answer", *sentences)))
    return messages


def _question(history: list[Any]) -> int | None:
    """The index of what the user asks now: the user's last message; None if an answer follows it."""
    for index in reversed(range(len(history))):
        role = history[index].get("role") if isinstance(history[index], dict) else None
        if role not in ("system", "developer"):
            return index if role in ("user", "human") else None
    return None


@dataclass(frozen=True, eq=False)
class _Call:
    id: str
    name: str
    has_id: bool  # whether the client gave it one
    results: list[Message | None]  # results of its message's calls, in the order of the calls
    place: int  # in `results`


class _Reader:
    def __init__(self, reads_images: bool) -> None:
        self._reads_images = reads_images
        self._rows: list[tuple[Message, list[Message | None]]] = []  # messages, and the results of their calls
        self._open_calls: list[_Call] = []
        self._call_names: dict[str, str] = {}  # ids of calls → names
        self._answered_ids: set[str] = set()  # ids of calls
        self._answer_is_over = False  # whether the latest answer is: something other than an answer follows it
        self._thoughts: list[str] = []  # reasoning, in items of its own, of the answer that follows
        self._asked: Message | None = None  # the user's message that was kept from before a summary
        self._losses = Losses()
        self._late: dict[str, None] = {}  # names of functions whose results came too late
        self._repeated_results: dict[str, None] = {}
        self._unknown_roles: dict[str, None] = {}  # that no API has

    def messages(self) -> list[Message]:
        return [one for message, results in self._rows for one in (message, *results) if one is not None]

    def warnings(self) -> list[str]:
        self._end_answer()
        kinds = {
            "parts of messages that have no text are left out, of type": self._losses.left_out,
            "parts of messages are put as text, of type": self._losses.as_text,
            "results without a call, or later than the next answer, are put as text, of the function": self._late,
            "second results of a call are left out, of the function": self._repeated_results,
            "earlier messages are put as the user's, of role": self._unknown_roles,
        }
        return [f"{sentence} {list_kinds(each)}" for sentence, each in kinds.items() if each]

    def read(self, at: str, entry: Any, *, is_question: bool, is_last: bool) -> None:
        """Read a message or an item. is_question: whether it is what the user asks now. Raises BadRequest."""
        kind = mapping(at, entry, "an object with a role and a content").get("type", "message")
        if kind == "item_reference" or {*entry} - {"paths"} == {"id"}:  # its type may be left out
            sentence = (
                f"{at}: item_reference: this server keeps no items of earlier responses, and would leave them out"
            )
            raise BadRequest(at, f"{sentence}: send the items themselves, as clients do where store is false")
        if entry.get("role") is None and isinstance(kind, str) and kind != "message":
            self._item(at, entry, kind)
            return
        role = entry.get("role")
        if role in _RESULT_ROLES:
            name = entry.get("tool_name") or entry.get("name")
            self._result(entry.get("tool_call_id"), name, [part for _, part in _parts_with_paths(at, entry)])
        elif not isinstance(role, str) or (is_last and role not in {**ROLES, **_FOREIGN_ROLES}):
            raise wrong_value(f"{at}.role", f"one of {', '.join(ROLES)}", role)
        else:
            template_role = ROLES.get(role) or _FOREIGN_ROLES.get(role)
            if template_role is None:
                self._unknown_roles[role] = None
            self._message(at, template_role or "user", entry, is_question)

    def _message(self, at: str, role: str, item: Mapping[str, Any], is_question: bool) -> None:
        is_answer = role == "assistant"
        given = [item[name] for name in REASONING if is_answer and item.get(name) is not None]
        reasoning = next(filter(None, [reasoning_in(one, self._losses) for one in given]), "")
        thoughts = [reasoning] if given else []
        pieces: list[Piece] = []
        calls: list[Message] = []
        if is_question and item.get("images") and not self._reads_images:
            raise BadRequest(f"{at}.images", f"{at}.images: this server takes text alone; leave images out")
        content = item.get("content")
        if content is not None and not isinstance(content, (str, list)) and kind_of(content) == "untyped":
            raise wrong_value(f"{at}.content", "a string or an array of text parts", content)
        taken = 0  # parts that become messages of their own
        for place, part in _parts_with_paths(at, item):
            kind = kind_of(part)
            if kind == "tool_result":
                self._result(part.get("tool_use_id"), None, part.get("content"))
                taken += 1
            elif kind == "compaction" and (summary := summary_in(part)):
                self._begin_with(summary)
                pieces, calls, thoughts, taken = [], [], [], 1
            elif is_answer and is_reasoning(kind):
                thought = reasoning_in(part, self._losses)
                thoughts.append("" if thought in reasoning else thought)  # clients may send both
            elif is_answer and kind == "tool_use":
                calls.append(_call(place, part, part.get("input"), "input"))
            else:
                pieces.append(
                    self._image_or_text(place, part, is_question) if role == "user" else self._part(place, part)
                )
        if is_answer:
            pieces += filter(None, [_text(item.get("refusal"))])
            if item.get("audio"):
                pieces.append(text_of_part({"type": "audio"}, self._losses))
            calls += _calls(at, item)
        message: Message = {"role": role} | ({"reasoning_content": "".join(thoughts)} if thoughts else {})
        if pieces or calls or thoughts or not taken:
            self._add(message | {"content": _content(pieces)} | ({"tool_calls": calls} if calls else {}))

    def _image_or_text(self, at: str, part: Any, is_question: bool = False) -> Piece:
        if self._reads_images and is_image(part):
            try:
                return {"type": "image", "image": image_in(at, part)}
            except BadRequest:
                if is_question:
                    raise
        return self._part(at, part, is_question)

    def _part(self, at: str, part: Any, is_question: bool = False) -> str:
        losses = Losses()
        content, kind = text_of_part(part, losses), kind_of(part)
        if losses.left_out and is_question:
            members = mapping(at, part, 'an object such as {"type": "text", "text": "…"}')
            text(f"{at}.text", members.get("text", ""))
            accepted_types = "text and images" if self._reads_images else "text"
            what = "a part without a type is" if kind == "untyped" else f"{describe(kind)} parts are"
            raise BadRequest(
                f"{at}.type", f"{at}.type: {what} not supported here: this server takes {accepted_types} alone"
            )
        self._losses.left_out.update(losses.left_out)
        self._losses.as_text.update(losses.as_text)
        return content

    def _item(self, at: str, item: Mapping[str, Any], kind: str) -> None:
        if is_reasoning(kind):
            self._thoughts.append(reasoning_in(item, self._losses))
        elif kind.endswith("_output"):
            content = item["output"] if item.get("output") is not None else item.get("status")
            self._result(item.get("call_id") or item.get("id"), None, content)
        elif kind == "function_call" or (kind.endswith("_call") and item.get("call_id")):
            name = next((name for name in CALLED_WITH if item.get(name) is not None), "arguments")
            arguments = item.get(name)
            if name != "arguments" and not isinstance(arguments, dict):
                arguments = {name: arguments}
            function = {"id": item.get("call_id"), "name": item.get("name", kind.removesuffix("_call"))}
            if isinstance(space := item.get("namespace"), str):
                function["name"] = in_namespace(space, _text(function["name"]))
            self._add_item([_call(at, function, arguments, name)], "")
        elif kind == "compaction" and (summary := summary_in(item)):
            self._begin_with(summary)
        elif text_of_item := self._part(at, item).strip():
            self._add_item([], text_of_item)

    def _begin_with(self, summary: str) -> None:
        """Put a summary in place of all that was read but the system's messages. The user's last message stays until
        the user says more: a summary that was written within an answer has it before itself."""
        messages = compact([message for message, _ in self._rows], summary)
        self._asked = None if is_summary(messages[-1]) else messages[-1]
        self._rows = [(message, []) for message in messages]
        self._open_calls, self._thoughts, self._answer_is_over = [], [], True

    def _add_item(self, calls: list[Message], content: str) -> None:
        """Add calls or a text of an answer. Calls join what the answer has so far: its items belong to one turn."""
        last = self._rows[-1] if self._rows else None
        if calls and last and last[0]["role"] == "assistant" and not self._answer_is_over and not self._thoughts:
            message, results = last
            message.setdefault("tool_calls", []).extend(calls)
            self._expect(calls, results)
        else:
            self._add({"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {}))

    def _add(self, message: Message) -> None:
        results: list[Message | None] = []
        if message["role"] == "assistant":
            thoughts, self._thoughts = "".join(self._thoughts), []
            if thoughts:
                message = {**message, "reasoning_content": thoughts + message.get("reasoning_content", "")}
            if self._answer_is_over:
                self._open_calls, self._answer_is_over = [], False
            self._expect(message.get("tool_calls", []), results)
        else:
            self._end_answer()
            if message["role"] == "user" and self._rows and self._rows[-1][0] is self._asked:
                self._rows.pop()
        self._rows.append((message, results))

    def _end_answer(self) -> None:
        if any(self._thoughts):
            self._losses.left_out["reasoning without an answer"] = None
        self._thoughts, self._answer_is_over = [], True

    def _expect(self, calls: list[Message], results: list[Message | None]) -> None:
        for call in calls:
            given_id, name, place = call["id"], call["function"]["name"], len(results)
            id = call["id"] = given_id or f"call_{place}"
            if len(self._open_calls) < _MOST_OPEN:
                self._open_calls.append(_Call(id, name, bool(given_id), results, place))
            results.append(None)
            self._call_names[id] = name
            self._answered_ids.discard(id)

    def _result(self, id: Any, name: Any, content: Any) -> None:
        """Put a result next to its call, or else as a text of the user's, who is not taken for the model."""
        id, name = _text(id), _name(name) if name else ""
        self._end_answer()
        pieces = self._tool_pieces(content)
        call = self._find_call(id, name)
        if call is not None:
            self._open_calls.remove(call)
            self._answered_ids.add(call.id)
            result = {"role": "tool", "content": _content(pieces), "tool_call_id": call.id, "name": call.name}
            call.results[call.place] = result
        elif id in self._answered_ids:
            self._repeated_results[self._call_names[id]] = None
        else:
            name = self._call_names.get(id, name) or "a tool"
            self._late[name] = None
            self._add({"role": "user", "content": _content([f"Result of {name}:\n", *pieces])})

    def _find_call(self, id: str, name: str) -> _Call | None:
        """The open call with an id. Where the client gave no ids, the first of this name, or of all."""
        open_call = next((call for call in self._open_calls if call.id == id), None)
        if open_call or id in self._call_names:
            return open_call
        calls = [call for call in self._open_calls if not id or not call.has_id]
        return next((call for call in calls if call.name == name), next(iter(calls), None))

    def _tool_pieces(self, content: Any) -> list[Piece]:
        pieces: list[Piece] = []
        for one in content if isinstance(content, list) else [] if content is None else [content]:
            has_text = isinstance(one, str) or kind_of(one) != "untyped"
            pieces.append(self._image_or_text("", one) if has_text else json.dumps(one, ensure_ascii=False))
        return pieces


def _parts_with_paths(at: str, item: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The parts of a message with their places; first the images, which Ollama's clients send next to the content."""
    content, images = item.get("content"), item.get("images")
    image_entries = enumerate(images if isinstance(images, list) else ())
    parts = [(f"{at}.images[{index}]", {"type": "image", "data": one}) for index, one in image_entries]
    if isinstance(content, list):
        return parts + [(f"{at}.content[{index}]", part) for index, part in enumerate(content) if part is not None]
    return [*parts, (f"{at}.content", "" if content is None else content)]


def _content(pieces: list[Piece]) -> str | list[Message]:
    """The text of a message; its parts, texts and images, if it has images."""
    if not any(isinstance(piece, dict) for piece in pieces):
        return "".join(map(str, pieces))
    parts: list[Message] = []
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        if not is_text:
            parts += run  # type: ignore[arg-type]
        elif text := "".join(map(str, run)):
            parts.append({"type": "text", "text": text})
    return parts


def _calls(at: str, message: Mapping[str, Any]) -> Iterator[Message]:
    calls, call = message.get("tool_calls"), message.get("function_call")
    if call and isinstance(call, dict) and not calls:  # OpenAI's, before there were tools
        yield _call(f"{at}.function_call", call, call.get("arguments"), "arguments")
    for index, call in enumerate(array(f"{at}.tool_calls", [] if calls is None else calls, "an array of calls")):
        place = f"{at}.tool_calls[{index}]"
        kind = "custom" if isinstance(call, dict) and isinstance(call.get("custom"), dict) else "function"
        function = call.get(kind) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise wrong_value(place, "an object with an id and a function", call)
        arguments = {"input": function.get("input")} if kind == "custom" else function.get("arguments")
        yield _call(place, {**function, "id": call.get("id")}, arguments, f"{kind}.arguments")


def _call(at: str, call: Mapping[str, Any], arguments: Any, member: str) -> Message:
    function = {"name": _name(call.get("name")), "arguments": _arguments(f"{at}.{member}", arguments)}
    return {"id": _text(call.get("id")), "type": "function", "function": function}


def _name(value: Any) -> str:
    """The name of a function that was called, without characters that another server allowed and templates do not."""
    return _UNSAFE_CHARACTERS.sub("_", _text(value))[:_LONGEST_NAME] or "unknown"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _arguments(field: str, value: Any) -> str:
    """The text of a call's arguments. It need not be a JSON object: an answer may end inside a call."""
    if isinstance(value, str):
        return value or "{}"
    try:
        return json.dumps({} if value is None else value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise BadRequest(field, f"{field} holds a number that JSON does not have") from None
