"""Calls in the form of another family of models: what can be nothing else is read as a call.

A model that was trained further, or on code, may write a call as another family does: in <tool_call> tags, as JSON or
with an argument in each tag; or as an answer that is nothing but JSON, perhaps in a block of code. It names a function
that may be called and has arguments that are an object; anything else is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from polarlm.engine.parsing.argument_readers import FieldArguments
from polarlm.model_loaders.chat.call_arguments import CallFields, json_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n?")
_FENCES = ("```json\n", "```tool_call\n", "```\n")
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>]+)>(?P<arguments>.*)</function>\s*", re.DOTALL)
_PARAMETERS = CallFields("<parameter=", ">", "</parameter>", "")
_NAMES_OF_ARGUMENTS = ("arguments", "parameters")

ForeignCall = tuple[str, str]
"""The name of a function and its arguments, JSON text."""


def may_be_calls(text: str, names: Mapping[str, Any]) -> bool:
    """Whether an answer that begins with `text` may be nothing but calls as JSON. names: of functions → schemas."""
    if any(fence.startswith(text) for fence in _FENCES):
        return True
    fence = _FENCE.match(text)
    begin = re.sub(r"\s", "", text[fence.end() :] if fence else text)
    begins = [f'{bracket}{{"name":{json.dumps(name, ensure_ascii=False)}' for bracket in ("", "[") for name in names]
    return any(one.startswith(begin) or begin.startswith(one) for one in begins)


def whole_calls(answer: str, names: Mapping[str, Any]) -> list[ForeignCall]:
    """The calls that an answer is nothing but; none if it is anything else."""
    text = answer.strip()
    if fence := _FENCE.match(text):
        if not text.endswith("```") or len(text) < fence.end() + 3:
            return []
        text = text[fence.end() : -3]
    return _calls_in_json(text, names)


def calls_in_tags(text: str, names: Mapping[str, Any]) -> list[ForeignCall]:
    """The calls between tags; none if it is anything else."""
    if (function := _FUNCTION.fullmatch(text)) is None:
        return _calls_in_json(text, names)
    name, arguments = (
        function["name"].strip(),
        re.sub(r">\n|\n</", lambda end: end[0].strip("\n"), function["arguments"]),
    )
    if name not in names:
        return []
    json_text, rest = FieldArguments(_PARAMETERS, "</function>", names[name]).push(f"{arguments.strip()}</function>")
    return [(name, json_text)] if rest == "</function>" else []


def _calls_in_json(text: str, names: Mapping[str, Any]) -> list[ForeignCall]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(one, names) for one in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if all(calls) else []


def _call(value: Any, names: Mapping[str, Any]) -> ForeignCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    fields = [value[key] for key in _NAMES_OF_ARGUMENTS if key in value]
    if len(fields) != 1 or set(value) - {"name", *_NAMES_OF_ARGUMENTS, "id", "type"}:
        return None
    arguments = json_object(fields[0]) if isinstance(fields[0], str) else fields[0]
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
