"""How a model writes tool calls: found by rendering calls of made-up functions through its own chat template.

What surrounds the names and the arguments in these renderings is what the model was trained to write. A template that
accepts no tools, or writes a call otherwise than as a name and then a JSON object, gets our general format: a system
text that lists the tools, and calls in <tool_call> tags.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polarlm.model_loaders.chat.call_arguments import json_object
from polarlm.model_loaders.chat.calls_as_text import calls_as_text
from polarlm.model_loaders.chat.renders import Renders
from polarlm.model_loaders.errors import LoadError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CallFormat:
    """The text of calls: `begin`, the calls separated by `between`, `end`.

    A call is `opening`, its name, `middle`, its arguments, `closing`; where the template writes the call's id before
    the arguments, `middle` is the text before and after the id. Where the template writes the id of a past call after
    the arguments, which the model does not, `shown_closing` replaces `closing` in past calls.
    """

    begin: str = ""
    opening: str = '<tool_call>\n{"name": "'
    middle: tuple[str, ...] = ('", "arguments": ',)  # two parts around an id
    closing: str = "}\n</tool_call>"
    between: str = "\n"
    end: str = ""
    shown_closing: tuple[str, ...] = ("}\n</tool_call>",)  # two parts around an id
    separators: tuple[str, str] = (", ", ": ")  # of the arguments' JSON
    several: bool = True  # whether an answer may have several calls
    native: bool = False  # whether the template accepts tools and calls; else they become text of messages
    arguments_as_text: bool = False  # whether the template expects arguments as JSON text, not as a value
    takes_any_text: bool = True  # whether the template accepts arguments that are not a JSON object, as text
    no_content: str | None = ""  # the content of a message that has only calls
    takes_system: bool = True  # whether the template accepts a system message
    short_ids: bool = False  # whether the template accepts only ids of 9 letters and digits
    content_is_reasoning: bool = False  # whether the template takes content beside calls for reasoning
    needs_descriptions: bool = False  # whether the template accepts only functions with a description

    @property
    def has_id(self) -> bool:
        """Whether the model writes the id of a call."""
        return len(self.middle) == 2

    def shown(self, calls: Iterable[tuple[str, str, str]]) -> str:
        """The text of past calls (name, arguments, id), as the template writes them."""
        texts = [
            f"{self.opening}{name}{id.join(self.middle)}{arguments}{id.join(self.shown_closing)}"
            for name, arguments, id in calls
        ]
        return f"{self.begin}{self.between.join(texts)}{self.end}"

    def written(self, arguments: Mapping[str, Any]) -> str:
        """The text of arguments, as the template writes them."""
        return json.dumps(arguments, ensure_ascii=False, separators=self.separators)

    def marker(self, control: Iterable[str]) -> str:
        """The text with which calls begin; empty if it is only the beginning of JSON.

        control: the names of the model's control tokens. If calls begin with one of them, that name is the marker.
        """
        text = self.begin + self.opening
        first = max((name for name in control if text.startswith(name)), key=len, default="")
        return first or _JSON_BEGINS.sub("", text).rstrip()

    def as_messages(self, messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
        """`messages` as the template accepts them; if it accepts no tools, those, calls and results become text."""
        if self.native:
            return [self._native(message) for message in messages]
        return calls_as_text(messages, tools, shown=self.shown, takes_system=self.takes_system)

    def as_tools(self, tools: Tools) -> list[Mapping[str, Any]]:
        """`tools` as the template accepts them; none if it accepts none."""
        if not self.native:
            return []
        if not self.needs_descriptions:
            return list(tools)
        return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]

    def _native(self, message: Message) -> dict[str, Any]:
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": self._id(message["tool_call_id"])}
        if not message.get("tool_calls"):
            return dict(message)
        calls = [
            {
                **call,
                "id": self._id(call["id"]),
                "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])},
            }
            for call in message["tool_calls"]
        ]
        said = {**message, "content": message["content"] or self.no_content, "tool_calls": calls}
        if self.content_is_reasoning and message["content"]:
            thoughts = filter(None, (message.get("reasoning_content"), message["content"]))
            said |= {"content": self.no_content, "reasoning_content": "\n\n".join(thoughts)}
        return said

    def _id(self, id: str) -> str:
        """An id that the template accepts, in place of another server's."""
        if not self.short_ids or _SHORT_ID.fullmatch(id):
            return id
        return hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]

    def _arguments(self, text: str) -> Any:
        """Arguments of a past call as the template accepts them; those of a call that was cut off may be any text."""
        value = json_object(text)
        if value is None:
            return text if self.takes_any_text else ("{}" if self.arguments_as_text else {})
        return text if self.arguments_as_text else value


# The beginning of a call in JSON, perhaps of a list of them.
_JSON_BEGINS = re.compile(r'\s*(\[\s*)?\{\s*"[^"]*"\s*:\s*"$')
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_END_OF_TURN = re.compile(r"<\|\w+\|>")
# The beginning of an id's field in JSON, after the arguments.
_ID_AFTER = re.compile(r'\s*,\s*"[^"]*"\s*:\s*"$')

_NAMES = ("alphaname", "betaname")
_IDS = ("alphaid01", "betaid002")  # some templates insist on 9 letters and digits
_LONG_ID = "call_0123456789abcdef"
_KEY, _VALUE, _COUNT, _NUMBER = "alphakey", "alphavalue", "alphacount", 7
_ARGUMENTS = {_KEY: _VALUE, _COUNT: _NUMBER}
_SYSTEM, _QUESTION, _ANSWER, _RESULT = "alphasystem", "alphaquestion", "alphaanswer", "alpharesult"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "alphadescription",
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
        },
    }
    for name in _NAMES
]
_BRIEF_TOOLS = [{"type": "function", "function": {"name": _NAMES[0], "parameters": {"type": "object"}}}]


def find_call_format(template: Renders) -> CallFormat:
    """The format of the template's calls; the general one if it accepts none. Raises LoadError if it cannot run."""
    user = {"role": "user", "content": _QUESTION}
    plain: list[Message] = [user, {"role": "assistant", "content": _ANSWER}]
    variants = [(as_text, content) for content in ("", None) for as_text in (False, True)]
    system = {"role": "system", "content": _SYSTEM}
    conversations: list[list[Message]] = [[system, user], [user], plain]
    for as_text, content in variants:
        one, two = _called(1, as_text, content), _called(2, as_text, content)
        conversations += [[user, one], [user, two], [user, one, _result(_IDS[0])]]
    led, prompt, answered, *rest = template.render_each(conversations, tools=_TOOLS, add_generation_prompt=False)
    (asked,) = template.render_each([[user]], tools=_TOOLS)
    general = CallFormat(takes_system=isinstance(led, str) and _SYSTEM in led)
    if not isinstance(prompt, str) or not isinstance(answered, str) or _NAMES[0] not in prompt:
        return general
    for (as_text, content), texts in zip(variants, zip(*[iter(rest)] * 3, strict=True), strict=True):
        found = _format(answered, *texts, as_text=as_text, content=content)
        found = found or _as_message(asked, texts[0], texts[2], arguments_as_text=as_text, no_content=content)
        if found:
            one = _called(1, as_text, content, _LONG_ID)
            cut = _called(1, as_text, content, arguments=f'{{"{_KEY}": "')
            long, text = template.render_each(
                [[user, one, _result(_LONG_ID)], [user, cut, _result(_IDS[0])]], tools=_TOOLS
            )
            (brief,) = template.render_each([[user]], tools=_BRIEF_TOOLS)
            takes_text = isinstance(text, str) and _KEY in text
            short, needs = not isinstance(long, str), not isinstance(brief, str)
            return replace(found, short_ids=short, takes_any_text=takes_text, needs_descriptions=needs)
    return general


def _result(id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": _NAMES[0], "content": _RESULT}


def _called(count: int, as_text: bool, content: str | None, *ids: str, arguments: Any = None) -> Message:
    arguments = arguments or (json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS)
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, id in zip(_NAMES[:count], ids or _IDS, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _format(
    answered: str,
    one: str | LoadError,
    two: str | LoadError,
    result: str | LoadError,
    *,
    as_text: bool,
    content: str | None,
) -> CallFormat | None:
    """The format, from renderings of an answer, one call, two calls and a result; None if they do not show it."""
    if not isinstance(one, str) or not isinstance(result, str) or _RESULT not in result:
        return None
    head, found, tail = answered.partition(_ANSWER)
    calls = _between(one, head, tail)
    if not found or calls is None:
        return None
    first = _CallSpan.find(calls, 0)
    if first is None or calls.count(_NAMES[0]) != 1:
        return None
    before, after = calls[: first.name], calls[first.end :]
    common: dict[str, Any] = {
        "middle": first.middle,
        "separators": first.separators,
        "native": True,
        "arguments_as_text": as_text,
        "no_content": content,
    }
    single = CallFormat(
        opening=before,
        closing=_without_id(after, _IDS[0]),
        shown_closing=_split_once(after, _IDS[0]),
        between="",
        several=False,
        **common,
    )
    both = _between(two, head, tail) if isinstance(two, str) else None
    second = None if both is None else _CallSpan.find(both, 1)
    place = None if both is None else _CallSpan.find(both, 0)
    if both is None or second is None or place is None or not both.startswith(before):
        return single
    gap = _split_once(both[place.end : second.name], _IDS[0])
    last = _split_once(both[second.end :], _IDS[1])
    if len(gap) != len(last):
        return single
    joint = gap[-1]
    opening = _common_end(joint, before)
    closing = _common_start(joint[: len(joint) - len(opening)], last[-1])
    found_format = CallFormat(
        begin=before[: len(before) - len(opening)],
        opening=opening,
        closing=_joined_without_id((*last[:-1], closing)),
        between=joint[len(closing) : len(joint) - len(opening)],
        end=last[-1][len(closing) :],
        shown_closing=(*last[:-1], closing),
        **common,
    )
    arguments = calls[first.arguments : first.end]
    shown = found_format.shown([(name, arguments, id) for name, id in zip(_NAMES, _IDS, strict=True)])
    return found_format if shown == both else single


def _as_message(
    prompt: str | LoadError, one: str | LoadError, result: str | LoadError, **found: Any
) -> CallFormat | None:
    """The format of calls that are messages: a call follows the prompt in the place of an answer, and ends the turn."""
    if not isinstance(prompt, str) or not isinstance(one, str) or not isinstance(result, str) or _RESULT not in result:
        return None
    call = _between(one, prompt, "")
    span = None if call is None else _CallSpan.find(call, 0)
    if call is None or span is None or not _END_OF_TURN.fullmatch(call[span.end :]):
        return None
    found |= {"several": False, "native": True, "content_is_reasoning": True, "separators": span.separators}
    return CallFormat(
        opening=call[: span.name], middle=span.middle, closing="", between="", shown_closing=("",), **found
    )


@dataclass(frozen=True)
class _CallSpan:
    """Where a call is in a text: the offset of its name, the text up to its arguments, the arguments' offsets."""

    name: int
    middle: tuple[str, ...]
    arguments: int
    end: int
    separators: tuple[str, str]

    @classmethod
    def find(cls, text: str, index: int) -> _CallSpan | None:
        """Call `index` in `text`; None if that is not a name and then a JSON object."""
        name = text.find(_NAMES[index])
        key = text.find(f'"{_KEY}"', name)
        start = text.rfind("{", 0, key)
        if name < 0 or key < 0 or start < name:
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            return None
        written = _WRITTEN.fullmatch(text[start:end])
        if value != _ARGUMENTS or written is None:
            return None
        middle = _split_once(text[name + len(_NAMES[index]) : start], _IDS[index])
        return cls(name, middle, start, end, (written["item"], written["key"]))


_WRITTEN = re.compile(
    rf'\{{"{_KEY}"(?P<key>: ?)"{_VALUE}"(?P<item>, ?)"{_COUNT}"(?P=key){_NUMBER}\}}',
)


def _between(text: str, head: str, tail: str) -> str | None:
    """The text between `head` and `tail`; None if they are missing. White space that ends `head` may be missing."""
    if not text.startswith(head):
        head = head.rstrip()
    inside = text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail)
    return text[len(head) : len(text) - len(tail)] if inside else None


def _split_once(text: str, id: str) -> tuple[str, ...]:
    before, found, after = text.partition(id)
    return (before, after) if found else (before,)


def _without_id(text: str, id: str) -> str:
    return _joined_without_id(_split_once(text, id))


def _joined_without_id(parts: tuple[str, ...]) -> str:
    """The end of a call as the model writes it: without the id that templates add to past calls."""
    if len(parts) == 1:
        return parts[0]
    before, after = parts
    return _ID_AFTER.sub("", before) + after.removeprefix('"')


def _common_end(a: str, b: str) -> str:
    return _common_start(a[::-1], b[::-1])[::-1]


def _common_start(a: str, b: str) -> str:
    count = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]
