"""Reads tools from JSON into the functions that an answer may call.

A custom tool, whose input is a text, is a function with one parameter: chat templates write no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from polarlm.engine.sampling.lark import lark_to_regex
from polarlm.engine.schemas.keywords import without_nulls
from polarlm.server.reading.parts import list_kinds
from polarlm.server.reading.values import (
    BadRequest,
    FieldWarnings,
    array,
    check_at_most,
    flag,
    is_empty,
    mapping,
    one_of,
    text,
    wrong_value,
)

MOST_TOOLS = 128
MOST_TEXT = 1 << 17  # characters of all tools as JSON
MOST_DEPTH = 64  # nesting of a tool's JSON
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MOST_SHOWN = 1 << 13  # characters of a grammar that the model reads
INPUT = "input"  # the parameter of a custom tool
_ANCHORS = re.compile(r"^\^|(?<!\\)((?:\\\\)*)\$$")  # around a regular expression, which is one of whole texts anyway
_CALLABLE = ("function", "custom")  # types of tools
_FUNCTION = '{"type": "function", "function": {"name": "…"}}'
_CHOICES: Mapping[str, Literal["may", "must", "none"]] = {"auto": "may", "required": "must", "none": "none"}


@dataclass(frozen=True)
class Tools:
    all: tuple[dict[str, Any], ...]  # in OpenAI's form, which chat templates expect
    callable: tuple[dict[str, Any], ...]  # the functions that this answer may call, with all that constrains them
    calls: Literal["may", "must", "none"]
    several: bool  # whether there may be more than one call
    custom: frozenset[str] = frozenset()  # the names of custom tools


def read_tools(body: Mapping[str, Any], field_warnings: FieldWarnings | None = None) -> Tools | None:
    """The functions of a request; None if it has none. Tools of other types are left out, and a choice of one of them
    is "auto": `field_warnings` gets fields and sentences. Raises BadRequest."""
    field_warnings = [] if field_warnings is None else field_warnings
    several = flag("parallel_tool_calls", body.get("parallel_tool_calls", True))
    value, choice = body.get("tools", []), body.get("tool_choice", "auto")
    array("tools", value, "an array of functions")
    kinds = [_kind(f"tools[{index}]", tool) for index, tool in enumerate(value)]
    others = [tool for kind, tool in zip(kinds, value, strict=True) if kind not in _CALLABLE]
    check_at_most(MOST_TOOLS, "tools", len(value) - len(others), "functions")
    if others:
        other_kinds = list_kinds(dict.fromkeys(kind for kind in kinds if kind not in _CALLABLE))
        field_warnings.append(("tools", f"tools of type {other_kinds} are left out: only functions are called"))
        choice = _drop_other_tools(others, choice, field_warnings, are_all=len(others) == len(value))
    if len(value) == len(others):
        if choice not in ("auto", "none"):
            raise BadRequest("tool_choice", "tool_choice needs tools, and there are none")
        return None
    if body.get("messages") is None:
        raise BadRequest("tools", "tools need messages: a raw prompt has to name its functions itself")
    shown: list[dict[str, Any]] = []
    by_name: dict[str, dict[str, Any]] = {}
    custom_names: set[str] = set()
    for index, one in enumerate(value):
        if kinds[index] in _CALLABLE:
            read_one = _custom_tool if kinds[index] == "custom" else _tool
            tool, callable_tool = read_one(f"tools[{index}]", one, field_warnings)
            name = tool["function"]["name"]
            shown.append(tool)
            by_name[name] = callable_tool
            custom_names |= {name} if kinds[index] == "custom" else set()
    check_at_most(MOST_TEXT, "tools", sum(len(json.dumps(tool)) for tool in shown), "characters of JSON")
    if len(by_name) < len(shown):
        raise BadRequest("tools", "tools names a function twice: give each a name of its own")
    tools = Tools(tuple(shown), tuple(by_name.values()), "may", several, frozenset(custom_names))
    if isinstance(choice, str) and choice in _CHOICES:
        return replace(tools, calls=_CHOICES[choice])
    expected = f"auto, none, required, or an object such as {_FUNCTION}"
    kind = mapping("tool_choice", choice, expected).get("type")
    if kind == "allowed_tools":
        return _allowed_tools(tools, by_name, choice.get("allowed_tools"))
    if kind not in _CALLABLE:
        raise wrong_value("tool_choice.type", f"function, custom or allowed_tools, as in {_FUNCTION}", kind)
    return replace(tools, callable=(by_name[_name("tool_choice", choice, by_name)],), calls="must", several=False)


def _kind(field: str, tool: Any) -> str:
    kind = mapping(field, tool, f"an object such as {_FUNCTION}").get("type")
    if kind is not None and not isinstance(kind, str):
        raise wrong_value(f"{field}.type", "function, or the name of another type", kind)
    return kind or "function"


def _drop_other_tools(
    others: list[dict[str, Any]], choice: Any, field_warnings: FieldWarnings, *, are_all: bool
) -> Any:
    """A choice of tools without `others`; "auto" if nothing else is chosen. are_all: whether there are no functions."""
    names = {_tool_name(tool) for tool in others}

    def is_left_out(one: Any) -> bool:
        if not isinstance(one, dict):
            return False
        return one.get("type") not in (None, *_CALLABLE, "allowed_tools") or _tool_name(one) in names

    is_dropped = is_left_out(choice) or (are_all and choice != "none")
    allowed = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if isinstance(allowed, dict) and isinstance(allowed_tools := allowed.get("tools"), list) and allowed_tools:
        kept_tools = [one for one in allowed_tools if not is_left_out(one)]
        is_dropped = is_dropped or not kept_tools
        choice = {**choice, "allowed_tools": {**allowed, "tools": kept_tools}}
    if is_dropped and choice != "auto":
        field_warnings.append(("tool_choice", "tool_choice is auto: it asks for a tool that is left out"))
    return "auto" if is_dropped else choice


def _tool_name(tool: Mapping[str, Any]) -> Any:
    """The name in a tool or in a choice of one, in any API's form; its type if it has none."""
    kind = tool.get("type") or "function"
    inner = tool.get(kind) if isinstance(kind, str) else None
    name = inner.get("name") if isinstance(inner, dict) else tool.get("name")
    return name if isinstance(name, str) else kind


def _allowed_tools(tools: Tools, by_name: Mapping[str, dict[str, Any]], allowed: Any) -> Tools:
    field = "tool_choice.allowed_tools"
    allowed = mapping(field, allowed, "an object with a mode and tools")
    mode = one_of(f"{field}.mode", allowed.get("mode"), ("auto", "required"))
    listed_tools = array(f"{field}.tools", allowed.get("tools"), f"an array of objects such as {_FUNCTION}", 1)
    names = dict.fromkeys(_name(f"{field}.tools[{index}]", one, by_name) for index, one in enumerate(listed_tools))
    return replace(tools, callable=tuple(by_name[name] for name in names), calls=_CHOICES[mode])


def _name(field: str, value: Any, by_name: Mapping[str, Any]) -> str:
    """The name of the function in an object such as _FUNCTION. Raises BadRequest unless it is one of `by_name`."""
    choice = mapping(field, value, f"an object such as {_FUNCTION}")
    kind = "custom" if choice.get("type") == "custom" else "function"
    function = mapping(f"{field}.{kind}", choice.get(kind), f"an object with a name, as in {_FUNCTION}")
    name = text(f"{field}.{kind}.name", function.get("name"))
    if name not in by_name:
        raise BadRequest(field, f"{field} names {name!r}, which is not one of the tools")
    return name


def _tool(field: str, value: Mapping[str, Any], _warnings: FieldWarnings) -> tuple[dict[str, Any], dict[str, Any]]:
    """A function as templates and as grammars of calls get it."""
    field = f"{field}.function"
    function = mapping(field, value.get("function"), "an object with a name")
    check_depth(field, function)
    tool: dict[str, Any] = {"name": read_name(f"{field}.name", function.get("name"))}
    if function.get("description") is not None:
        tool["description"] = text(f"{field}.description", function["description"])
    parameters = function.get("parameters")
    if is_empty(parameters):
        parameters = {"type": "object", "properties": {}}
    parameters = without_nulls(mapping(f"{field}.parameters", parameters, "a JSON schema, which is an object"))
    kind = parameters.get("type", "object")
    if isinstance(kind, list) and "object" in kind:
        kind = parameters["type"] = "object"
    if kind != "object":
        raise wrong_value(f"{field}.parameters.type", "object: arguments have names", kind)
    tool["parameters"] = parameters
    if function.get("strict") is not None:
        tool["strict"] = flag(f"{field}.strict", function["strict"])
    read_tool = {"type": "function", "function": tool}
    return read_tool, read_tool


def _custom_tool(
    field: str, value: Mapping[str, Any], field_warnings: FieldWarnings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A custom tool as a function: templates get its grammar in words, and grammars of calls as a pattern."""
    field = f"{field}.custom"
    custom = mapping(field, value.get("custom"), "an object with a name")
    name = read_name(f"{field}.name", custom.get("name"))
    description = text(f"{field}.description", custom.get("description") or "")
    format, at = mapping(f"{field}.format", custom.get("format") or {"type": "text"}), f"{field}.format"
    schema: dict[str, Any] = {"type": "string"}
    pattern: str | None = None
    if one_of(f"{at}.type", format.get("type"), ("text", "grammar")) == "grammar":
        grammar, at = mapping(f"{at}.grammar", format.get("grammar")), f"{at}.grammar"
        syntax = one_of(f"{at}.syntax", grammar.get("syntax"), ("lark", "regex"))
        definition = text(f"{at}.definition", grammar.get("definition"), MOST_TEXT)
        pattern = _pattern(f"{at}.definition", syntax, definition)
        if pattern is None:
            sentence = f"the grammar of the tool {name} does not hold: it is recursive, or very long"
            field_warnings.append(("tools", sentence))
        if len(definition) <= _MOST_SHOWN:
            kind = "Lark grammar" if syntax == "lark" else "regular expression"
            description = f"{description}\n\nThe {INPUT} must match this {kind}:\n{definition}".strip()

    def function(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT]}
        members = {"name": name, "description": description, "parameters": parameters}
        return {"type": "function", "function": {**members, **more}}

    shown = function(schema)
    return shown, shown if pattern is None else function({**schema, "pattern": pattern}, strict=True)


def _pattern(field: str, syntax: str, definition: str) -> str | None:
    """The JSON schema's pattern for whole texts of a grammar; None if it can have none. Raises BadRequest."""
    try:
        expression = lark_to_regex(definition) if syntax == "lark" else _ANCHORS.sub(r"\1", definition)
    except ValueError as error:
        raise BadRequest(field, f"{field} cannot be used: {error}") from None
    return None if expression is None else f"^(?:{expression})$"


def read_name(field: str, value: Any) -> str:
    if NAME.fullmatch(text(field, value)) is None:
        raise BadRequest(field, f"{field} must have 1 to 128 letters, digits and characters of _.:/-")
    return str(value)


def in_namespace(namespace: str, name: str) -> str:
    """Our name of a function in a namespace of OpenAI's Responses."""
    return f"{namespace}__{name}"


def check_depth(field: str, value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        nested = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [inner for one in nested for inner in one]
        if not level:
            return
    raise BadRequest(field, f"{field} is nested more than {MOST_DEPTH} levels deep")
