"""How a model writes tool calls, and how its chat template takes them.

What surrounds names and arguments in the template's own renderings is what the model was trained to write
(`find_calls.py`). A template that accepts no tools, or whose calls nothing here reads, gets our general format: a
system text that lists the tools, and calls in <tool_call> tags.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.model_loaders.chat.call_arguments import CallFields, json_object, quote_value
from polarlm.model_loaders.errors import LoadError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[..., list[str | LoadError]]
"""`ChatTemplate.render_each`, for modules that analyse what a template makes of made-up conversations."""


@dataclass(frozen=True)
class CallFormat:
    """The text of calls: `begin`, the calls separated by `call_separator`, `end`.

    A call is `opening`, its name, `middle`, its arguments, `closing`; where the template writes the call's id before
    the arguments, `middle` is the text before and after the id. Where the template writes the id of a past call after
    the arguments, which the model does not, `shown_closing` replaces `closing` in past calls.
    """

    begin: str = ""
    opening: str = '<tool_call>\n{"name": "'
    middle: tuple[str, ...] = ('", "arguments": ',)  # two parts around an id
    closing: str = "}\n</tool_call>"
    call_separator: str = "\n"
    end: str = ""
    shown_closing: tuple[str, ...] = ("}\n</tool_call>",)  # two parts around an id
    separators: tuple[str, str] = (", ", ": ")  # between arguments, and after a name
    quote: str = ""  # before and after a string in the arguments; empty if they are JSON (see `call_arguments.quoted`)
    fields: CallFields | None = None  # how arguments are written that are no object
    has_several: bool = True  # whether an answer may have several calls
    is_native: bool = False  # whether the template accepts tools and calls; else they become text of messages
    arguments_as_text: bool = False  # whether the template expects arguments as JSON text, not as a value
    takes_any_text: bool = True  # whether the template accepts arguments that are not a JSON object, as text
    no_content: str | None = ""  # the content of a message that has only calls
    short_ids: bool = False  # whether the template accepts only ids of 9 letters and digits
    id_form: str = ""  # an id of {name} and {index} among all calls, of which the model writes the index after the name
    content_is_reasoning: bool = False  # whether the template takes content next to calls for reasoning
    needs_descriptions: bool = False  # whether the template accepts only functions with a description
    takes_results: bool = False  # whether the template takes results as "tool_responses" of the message that calls
    is_unknown: bool = False  # whether the template lists tools, but writes calls as nothing here reads

    @property
    def has_id(self) -> bool:
        """Whether the model writes the id of a call, or a part of it."""
        return len(self.middle) == 2

    @property
    def is_numbered(self) -> bool:
        """Whether a call's number, from 0 on, stands before it: at the ends of `begin` and `call_separator`."""
        return self.begin.endswith("0") and self.call_separator.endswith("1")

    def separator(self, number: int) -> str:
        """The text before the call with this number, which is not the first."""
        return f"{self.call_separator[:-1]}{number}" if self.is_numbered else self.call_separator

    def write_calls(self, calls: Iterable[tuple[str, str, str]]) -> str:
        """The text of past calls (name, arguments, id), as the template writes them."""
        texts = []
        for name, arguments, id in calls:
            head = f"{name}{id.join(self.middle)}"
            if self.id_form:  # the template writes the id, which has the name
                head = id.removeprefix(self.id_form.partition("{")[0]) + self.middle[1]
            texts.append(f"{self.opening}{head}{arguments}{id.join(self.shown_closing)}")
        joined = "".join(f"{self.separator(number) if number else ''}{text}" for number, text in enumerate(texts))
        return f"{self.begin}{joined}{self.end}"

    def call_id(self, name: str, written: str) -> str:
        """The id of a call that the model has written as `written`."""
        return self.id_form.format(name=name, index=written) if self.id_form else written

    def write(self, arguments: Mapping[str, Any]) -> str:
        """The text of arguments, as the template writes them."""
        if self.fields is not None:
            return self.fields.write(arguments)
        if self.quote:
            return quote_value(dict(arguments), self.quote)
        return json.dumps(arguments, ensure_ascii=False, separators=self.separators)

    def rewrite(self, text: str) -> str:
        """Arguments of a past call, JSON text, as the template writes them; the same text if they are cut off."""
        value = json_object(text) if self.fields is not None or self.quote else None
        return text if value is None else self.write(value)

    def marker(self, control: Iterable[str]) -> str:
        """The text with which calls begin; empty if it is only the beginning of JSON.

        control: the names of the model's control tokens. If calls begin with one of them, that name is the marker.
        """
        text = self.begin + self.opening
        first = max((name for name in control if text.startswith(name)), key=len, default="")
        return first or _JSON_BEGINS.sub("", text).rstrip()

    def as_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """`messages` with calls and results as a template accepts them that accepts tools."""
        ids: dict[str, str] = {}  # as they are → as the template accepts them; of the calls so far
        native_messages = [self._native(message, ids) for message in messages]
        return _with_results(native_messages) if self.takes_results else native_messages

    def as_tools(self, tools: Tools) -> list[Mapping[str, Any]]:
        """`tools` as the template accepts them; none if it accepts none."""
        if not self.is_native:
            return []
        if not self.needs_descriptions:
            return list(tools)
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]

    def _native(self, message: Message, ids: dict[str, str]) -> dict[str, Any]:
        if "tool_call_id" in message:
            id = message["tool_call_id"]
            message = {**message, "tool_call_id": ids.get(id) or self._id(id, message.get("name") or "", len(ids))}
        if not message.get("tool_calls"):
            return dict(message)
        calls = []
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], self._arguments(call["function"]["arguments"])
            id = ids[call["id"]] = self._id(call["id"], name, len(ids))
            calls.append({**call, "id": id, "function": {**call["function"], "arguments": arguments}})
        native_message = {**message, "content": message["content"] or self.no_content, "tool_calls": calls}
        if self.content_is_reasoning and message["content"]:
            thoughts = filter(None, (message.get("reasoning_content"), message["content"]))
            native_message |= {"content": self.no_content, "reasoning_content": "\n\n".join(thoughts)}
        return native_message

    def _id(self, id: str, name: str, count: int) -> str:
        """An id that the template accepts, in place of another server's. count: of the calls before."""
        if self.id_form:
            is_right = id.startswith(head := self.call_id(name, "")) and id.removeprefix(head).isdecimal()
            return id if is_right else self.call_id(name, str(count))
        if not self.short_ids or _SHORT_ID.fullmatch(id):
            return id
        return hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]

    def _arguments(self, text: str) -> Any:
        """Arguments of a past call as the template accepts them; they may be any text if the call was cut off."""
        value = json_object(text)
        if value is None:
            return text if self.takes_any_text else ("{}" if self.arguments_as_text else {})
        return text if self.arguments_as_text else value


# The beginning of a call in JSON, perhaps of a list of them, or of a list of calls as in Python.
_JSON_BEGINS = re.compile(r'\s*((\[\s*)?\{\s*"[^"]*"\s*:\s*"|\[)$')
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with results as fields of the messages whose calls they follow, under the names of the functions."""
    merged_messages: list[dict[str, Any]] = []
    for message in messages:
        calls = merged_messages[-1].get("tool_calls") if merged_messages else None
        if message["role"] != "tool" or not calls:
            merged_messages.append(message)
            continue
        names = {call["id"]: call["function"]["name"] for call in calls}
        name = names.get(message.get("tool_call_id"), message.get("name") or calls[0]["function"]["name"])
        results = [*merged_messages[-1].get("tool_responses", ()), {"name": name, "response": message["content"]}]
        merged_messages[-1] = {**merged_messages[-1], "tool_responses": results}
    return merged_messages
