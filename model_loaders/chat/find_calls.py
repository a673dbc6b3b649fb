"""Finds how a model writes calls of tools by rendering calls of made-up functions through its chat template."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from polarlm.model_loaders.chat.call_arguments import CallFields
from polarlm.model_loaders.chat.call_format import CallFormat, Message, Render
from polarlm.model_loaders.errors import LoadError

_END_OF_TURN = re.compile(r"<\|\w+\|>")
_RESULT_START = re.compile(r"<\|?\w+\|?>")  # after calls that have no results yet
# The beginning of an id's field in JSON, after the arguments.
_ID_AFTER = re.compile(r'\s*,\s*"[^"]*"\s*:\s*"$')

_NAMES = ("alphaname", "betaname")
_IDS = ("alphaid01", "betaid002")  # some templates insist on 9 letters and digits
_ID_FORMS = ("", "functions.{name}:{index}")  # see `CallFormat.id_form`
_LONG_ID = "call_0123456789abcdef"
_KEY, _VALUE, _COUNT, _NUMBER = "alphakey", "alphavalue", "alphacount", 7
_ARGUMENTS = {_KEY: _VALUE, _COUNT: _NUMBER}
_OTHER_VALUES = {"words": True, "array": ["a"], "object": {"a": "b"}}
_QUESTION, _ANSWER, _RESULT = "alphaquestion", "alphaanswer", "alpharesult"
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


def find_call_format(render: Render) -> CallFormat:
    """The format of the template's calls; the general one if it accepts none, or writes them as nothing here reads.
    Raises LoadError if it cannot run."""
    user = {"role": "user", "content": _QUESTION}
    plain: list[Message] = [user, {"role": "assistant", "content": _ANSWER}]
    prompt, answer_text = render([[user], plain], tools=_TOOLS, add_generation_prompt=False)
    if not isinstance(prompt, str) or not isinstance(answer_text, str) or _NAMES[0] not in prompt:
        return CallFormat()
    formats = (_find_with_ids(render, user, answer_text, id_form) for id_form in _ID_FORMS)
    return next(filter(None, formats), CallFormat(is_unknown=True))


def _find_with_ids(render: Render, user: Message, answer_text: str, id_form: str) -> CallFormat | None:
    """The format if the ids of calls have this form; None if nothing here reads it."""
    ids = tuple(id_form.format(name=name, index=i) for i, name in enumerate(_NAMES)) if id_form else _IDS
    variants = [(as_text, content) for content in ("", None) for as_text in (False, True)]
    conversations: list[list[Message]] = []
    for as_text, content in variants:
        one, two = _message_with_calls(1, as_text, content, *ids), _message_with_calls(2, as_text, content, *ids)
        without_arguments = _message_with_calls(1, as_text, content, *ids, arguments="{}" if as_text else {})
        conversations += [[user, one], [user, two], [user, one, _result(ids[0])], [user, without_arguments]]
    rest = render(conversations, tools=_TOOLS, add_generation_prompt=False)
    (question_prompt,) = render([[user]], tools=_TOOLS)
    for (as_text, content), texts in zip(variants, zip(*[iter(rest)] * 4, strict=True), strict=True):
        format = _format(answer_text, *texts, as_text=as_text, content=content, id_form=id_form)
        format = format or _as_message(
            question_prompt, texts[0], texts[2], arguments_as_text=as_text, no_content=content
        )
        if format:
            return _with_limits(format, render, user)
    return None


def _with_limits(format: CallFormat, render: Render, user: Message) -> CallFormat:
    """`format` with what the template accepts of tools, arguments and results."""
    as_text, content = format.arguments_as_text, format.no_content
    one = _message_with_calls(1, as_text, content, _LONG_ID)
    cut_call = _message_with_calls(1, as_text, content, arguments=f'{{"{_KEY}": "')
    call_with_response = {**one, "tool_responses": [{"name": _NAMES[0], "response": _RESULT}]}
    other_values = json.dumps(_OTHER_VALUES) if as_text else _OTHER_VALUES
    call_with_values = _message_with_calls(1, as_text, content, arguments=other_values)
    long_id_text, text, response_text, values = render(
        [
            [user, one, _result(_LONG_ID)],
            [user, cut_call, _result(_IDS[0])],
            [user, call_with_response],
            [user, call_with_values],
        ],
        tools=_TOOLS,
    )
    (brief,) = render([[user]], tools=_BRIEF_TOOLS)
    return replace(
        format,
        short_ids=not isinstance(long_id_text, str),
        fields=format.fields and _with_values(format.fields, values),
        takes_any_text=isinstance(text, str) and _KEY in text and not (format.quote or format.fields),
        needs_descriptions=not isinstance(brief, str),
        takes_results=isinstance(response_text, str) and _RESULT in response_text,
    )


def _result(id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "name": _NAMES[0], "content": _RESULT}


def _message_with_calls(count: int, as_text: bool, content: str | None, *ids: str, arguments: Any = None) -> Message:
    if arguments is None:
        arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, id in zip(_NAMES[:count], ids or _IDS, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _format(
    answer_text: str,
    one: str | LoadError,
    two: str | LoadError,
    result: str | LoadError,
    without_arguments: str | LoadError,
    *,
    as_text: bool,
    content: str | None,
    id_form: str,
) -> CallFormat | None:
    """The format, from renderings of an answer, one call, two calls, a result, and a call without arguments; None if
    they do not show it. White space before the calls is the end of a text before them, or stands for it."""
    ids = ("0", "1") if id_form else _IDS  # as the model writes them
    if not isinstance(one, str) or not isinstance(result, str) or _RESULT not in result:
        return None
    head, _, tail = answer_text.partition(_ANSWER)
    is_open = not one.endswith(tail)  # the turn goes on with the result
    tail = "" if is_open else tail
    calls = _text_between(one, head, tail) if _ANSWER in answer_text else None
    calls = None if calls is None else calls.lstrip()
    first = None if calls is None else _CallSpan.find(calls, 0, ids)
    fields = None
    if calls is not None and first is None and isinstance(without_arguments, str):
        fields = _fields(calls, (_text_between(without_arguments, head, tail) or "").lstrip())
        first = _CallSpan.find(calls, 0, ids, fields)
    if calls is None or first is None or calls.count(_NAMES[0]) != 1:
        return None
    if id_form and not (calls[: first.name].endswith(id_form.partition("{")[0]) and len(first.middle) == 2):
        return None
    opening_text, closing_parts = calls[: first.name], _split_at_id(calls[first.end :], ids[0], first)
    common: dict[str, Any] = {
        "middle": first.middle,
        "separators": first.separators,
        "quote": first.quote,
        "fields": fields,
        "is_native": True,
        "arguments_as_text": as_text,
        "no_content": content,
        "id_form": id_form,
    }
    single = CallFormat(
        opening=opening_text,
        closing=_without_id(closing_parts),
        shown_closing=closing_parts,
        call_separator="",
        has_several=False,
        **common,
    )
    single_format = None if is_open else single
    two_calls = _text_between(two, head, tail) if isinstance(two, str) else None
    two_calls = None if two_calls is None else two_calls.lstrip()
    second = None if two_calls is None else _CallSpan.find(two_calls, 1, ids, fields)
    place = None if two_calls is None else _CallSpan.find(two_calls, 0, ids, fields)
    if two_calls is None or second is None or place is None or not two_calls.startswith(opening_text):
        return single_format
    gap = _split_at_id(two_calls[place.end : second.name], ids[0], place)
    last = _split_at_id(two_calls[second.end :], ids[1], second)
    if len(gap) != len(last):
        return single_format
    joint = gap[-1]
    opening = _common_start(joint[::-1], opening_text[::-1])[::-1]
    opening = opening[_rest_of_tag(opening_text[: len(opening_text) - len(opening)], opening) :]
    closing = _whole_tags(_common_start(joint[: len(joint) - len(opening)], last[-1]))
    several = CallFormat(
        begin=opening_text[: len(opening_text) - len(opening)],
        opening=opening,
        closing=_without_id((*last[:-1], closing)),
        call_separator=joint[len(closing) : len(joint) - len(opening)],
        end=last[-1][len(closing) :],
        shown_closing=(*last[:-1], closing),
        **common,
    )
    arguments = calls[first.arguments : first.end]
    is_right = (
        several.write_calls((name, arguments, several.call_id(name, id)) for name, id in zip(_NAMES, ids, strict=True))
        == two_calls
    )
    if not is_open:
        return several if is_right else single
    return replace(several, end="") if is_right and _RESULT_START.fullmatch(several.end) else None


def _as_message(
    prompt: str | LoadError, one: str | LoadError, result: str | LoadError, **common: Any
) -> CallFormat | None:
    """The format of calls that are messages: a call follows the prompt instead of an answer, and ends the turn."""
    if not isinstance(prompt, str) or not isinstance(one, str) or not isinstance(result, str) or _RESULT not in result:
        return None
    call = _text_between(one, prompt, "")
    span = None if call is None else _CallSpan.find(call, 0, _IDS)
    if call is None or span is None or not _END_OF_TURN.fullmatch(call[span.end :]):
        return None
    common |= {"has_several": False, "is_native": True, "content_is_reasoning": True, "separators": span.separators}
    return CallFormat(
        opening=call[: span.name], middle=span.middle, closing="", call_separator="", shown_closing=("",), **common
    )


# The arguments as JSON, and between quotes of the template's own.
_JSON_ARGUMENTS = re.compile(rf'\{{"{_KEY}"(?P<key>: ?)"{_VALUE}"(?P<item>, ?)"{_COUNT}"(?P=key){_NUMBER}\}}')
_QUOTED_ARGUMENTS = re.compile(
    rf"\{{{_COUNT}(?P<key>:){_NUMBER}(?P<item>,){_KEY}(?P=key)(?P<quote><[^<>\s]+>){_VALUE}(?P=quote)\}}"
)


# The arguments as names and values with texts before, between and after them.
_SEPARATE_ARGUMENTS = re.compile(
    rf"{_NAMES[0]}(.+?){_KEY}(.+?){_VALUE}(.*?){_COUNT}(.+?){_NUMBER}(.*)",
    re.DOTALL,
)


def _fields(calls: str, without_arguments: str) -> CallFields | None:
    """How a call's arguments are written that are no object, from a call and the same without arguments."""
    match, empty = _SEPARATE_ARGUMENTS.search(calls), without_arguments.partition(_NAMES[0])[2]
    if match is None:
        return None
    first, to_text, next, separator, last = match.groups()
    # <parameter name="key" string="true">, with false before what is no string
    is_marked = to_text != separator and to_text.replace("true", "false") == separator
    quote = "" if is_marked else to_text.removeprefix(separator)
    if quote not in ("", "'", '"') or not next.startswith(quote):
        return None
    next = next.removeprefix(quote)
    prefix = first[len(_whole_tags(_common_start(first, empty))) :]
    suffix = _whole_tags(_common_start(next, last))
    between = next[len(suffix) : len(next) - len(prefix)]
    fields = CallFields(prefix, to_text if is_marked else separator, suffix, between, quote)
    if is_marked:
        fields = replace(fields, other_joint=separator)
    is_right = calls.replace(fields.write(_ARGUMENTS), "", 1) == without_arguments and last != suffix
    return fields if is_right and (quote or suffix.strip()) else None


def _with_values(fields: CallFields, text: str | LoadError) -> CallFields:
    """`fields` with how a call in `text` writes what is neither a string nor a number."""
    texts = {name: f"{name}{fields.joint}{value!r}" for name, value in _OTHER_VALUES.items()}
    return replace(fields, python=tuple(name for name in texts if isinstance(text, str) and texts[name] in text))


def _whole_tags(text: str) -> str:
    """`text` without the beginning of a tag at its end."""
    return re.sub(r"<[^<>]*$", "", text)


def _rest_of_tag(head: str, text: str) -> int:
    """The length of the rest of a tag, at the beginning of `text`, that begins in the `head` before it."""
    return text.find(">") + 1 if _whole_tags(head) != head else 0


def _split_at_id(text: str, id: str, span: _CallSpan) -> tuple[str, ...]:
    """The text after the arguments of a call, in two parts around its id if that was not before them."""
    return tuple(text.split(id, 1)) if len(span.middle) == 1 else (text,)


@dataclass(frozen=True)
class _CallSpan:
    """Where a call is in a text: the offset of its name, the text up to its arguments, the arguments' offsets."""

    name: int
    middle: tuple[str, ...]
    arguments: int
    end: int
    separators: tuple[str, str]
    quote: str

    @classmethod
    def find(cls, text: str, index: int, ids: tuple[str, str], fields: CallFields | None = None) -> _CallSpan | None:
        """Call `index` in `text`; None if that is not a name and then its arguments: an object, or these `fields`.
        ids: of the calls, as the model writes them."""
        name = text.find(_NAMES[index])
        if fields is not None:
            start = text.find(arguments_text := fields.write(_ARGUMENTS), name)
            middle = tuple(text[name + len(_NAMES[index]) : start].split(ids[index], 1))
            return (
                cls(name, middle, start, start + len(arguments_text), (", ", ": "), "") if 0 <= name < start else None
            )
        key = min((at for at in (text.find(_KEY, name), text.find(_COUNT, name)) if at >= 0), default=-1)
        start = text.rfind("{", 0, key)
        match = (
            _JSON_ARGUMENTS.match(text, start) or _QUOTED_ARGUMENTS.match(text, start) if 0 <= name <= start else None
        )
        if match is None or key < 0:
            return None
        middle = tuple(text[name + len(_NAMES[index]) : start].split(ids[index], 1))
        separators = match["item"], match["key"]
        return cls(name, middle, start, match.end(), separators, match.groupdict().get("quote", ""))


def _text_between(text: str, head: str, tail: str) -> str | None:
    """The text between `head` and `tail`; None if they are missing. White space that ends `head` may be missing."""
    if not text.startswith(head):
        head = head.rstrip()
    is_between = text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail)
    return text[len(head) : len(text) - len(tail)] if is_between else None


def _without_id(parts: tuple[str, ...]) -> str:
    """The end of a call as the model writes it: without the id that templates add to past calls."""
    if len(parts) == 1:
        return parts[0]
    head, tail = parts
    return _ID_AFTER.sub("", head) + tail.removeprefix('"')


def _common_start(a: str, b: str) -> str:
    count = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]
