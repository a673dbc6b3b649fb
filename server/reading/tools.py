"""Reads tools from JSON into the functions that an answer may call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polarlm.server.reading.values import BadRequest, flag, text, wrong

MOST_TOOLS = 128
MOST_TEXT = 1 << 17  # characters of all tools as JSON
MOST_DEPTH = 64  # of a tool's JSON
MOST_CALLS = 128  # in a message
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_FUNCTION = '{"type": "function", "function": {"name": "…"}}'
_CHOICES: Mapping[str, Literal["may", "must", "none"]] = {"auto": "may", "required": "must", "none": "none"}


@dataclass(frozen=True)
class Tools:
    """The functions of a request."""

    given: tuple[dict[str, Any], ...]  # in OpenAI's form, which chat templates expect
    callable: tuple[dict[str, Any], ...]  # those that this answer may call
    calls: Literal["may", "must", "none"]
    several: bool  # whether there may be more than one call


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools of a request; None if it has none. Raises BadRequest."""
    several = flag("parallel_tool_calls", body.get("parallel_tool_calls", True))
    value, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if not isinstance(value, list):
        raise wrong("tools", "an array of functions", value)
    if len(value) > MOST_TOOLS:
        raise BadRequest("tools", f"tools has {len(value)} functions, but at most {MOST_TOOLS} are taken")
    if not value:
        if choice not in ("auto", "none"):
            raise BadRequest("tool_choice", "tool_choice needs tools, and there are none")
        return None
    if body.get("messages") is None:
        raise BadRequest("tools", "tools need messages: a raw prompt has to name its functions itself")
    tools = tuple(_tool(f"tools[{index}]", tool) for index, tool in enumerate(value))
    size = sum(len(json.dumps(tool)) for tool in tools)
    if size > MOST_TEXT:
        raise BadRequest("tools", f"tools has {size:,} characters of JSON, but at most {MOST_TEXT:,} are taken")
    named = {tool["function"]["name"]: tool for tool in tools}
    if len(named) < len(tools):
        raise BadRequest("tools", "tools names a function twice: give each a name of its own")
    if isinstance(choice, str) and choice in _CHOICES:
        return Tools(tools, tools, _CHOICES[choice], several)
    if not isinstance(choice, dict):
        raise wrong("tool_choice", f"auto, none, required, or an object such as {_FUNCTION}", choice)
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(tools, named, choice.get("allowed_tools"), several)
    if kind != "function":
        raise wrong("tool_choice.type", f"function or allowed_tools, as in {_FUNCTION}", kind)
    return Tools(tools, (named[_name("tool_choice", choice, named)],), "must", several=False)


def _allowed(
    tools: tuple[dict[str, Any], ...], named: Mapping[str, dict[str, Any]], allowed: Any, several: bool
) -> Tools:
    """The tools of a request whose answer may call only some of them."""
    field = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        raise wrong(field, "an object with a mode and tools", allowed)
    mode, some = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{field}.mode", "auto or required", mode)
    if not isinstance(some, list) or not some:
        raise wrong(f"{field}.tools", f"an array of objects such as {_FUNCTION}", some)
    names = dict.fromkeys(_name(f"{field}.tools[{index}]", one, named) for index, one in enumerate(some))
    return Tools(tools, tuple(named[name] for name in names), _CHOICES[mode], several)


def _name(field: str, value: Any, named: Mapping[str, Any]) -> str:
    """The name of the function in an object such as _FUNCTION. Raises BadRequest unless it is one of `named`."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        if isinstance(value, dict):
            raise wrong(f"{field}.function", f"an object with a name, as in {_FUNCTION}", function)
        raise wrong(field, f"an object such as {_FUNCTION}", value)
    name = text(f"{field}.function.name", function.get("name"))
    if name not in named:
        raise BadRequest(field, f"{field} names {name!r}, which is not one of the tools")
    return name


def _tool(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(field, 'an object such as {"type": "function", "function": {"name": "…"}}', value)
    if value.get("type") != "function":
        raise wrong(f"{field}.type", "function, the only type of tool here", value.get("type"))
    function = value.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{field}.function", "an object with a name", function)
    field = f"{field}.function"
    check_depth(field, function)
    tool: dict[str, Any] = {"name": read_name(f"{field}.name", function.get("name"))}
    if function.get("description") is not None:
        tool["description"] = text(f"{field}.description", function["description"])
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise wrong(f"{field}.parameters", "a JSON schema, which is an object", parameters)
    if parameters.get("type", "object") != "object":
        raise wrong(f"{field}.parameters.type", "object: arguments have names", parameters["type"])
    tool["parameters"] = parameters
    if function.get("strict") is not None:
        tool["strict"] = flag(f"{field}.strict", function["strict"])
    return {"type": "function", "function": tool}


def read_name(field: str, value: Any) -> str:
    """The name of a function. Raises BadRequest."""
    if NAME.fullmatch(text(field, value)) is None:
        raise BadRequest(field, f"{field} must have 1 to 128 letters, digits and characters of _.:/-")
    return str(value)


def check_depth(field: str, value: Any) -> None:
    """Raises BadRequest for JSON that is nested too deeply or has strings that are not text."""
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [inner for each in level for inner in _inside(field, each)]
        if not level:
            return
    raise BadRequest(field, f"{field} is nested more than {MOST_DEPTH} levels deep")


def _inside(field: str, value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif isinstance(value, str):
        text(field, value)


def read_calls(field: str, value: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message. Raises BadRequest."""
    if not isinstance(value, list):
        raise wrong(field, "an array of calls", value)
    if len(value) > MOST_CALLS:
        raise BadRequest(field, f"{field} has {len(value)} calls, but at most {MOST_CALLS} are taken")
    return [_call(f"{field}[{index}]", call) for index, call in enumerate(value)]


def _call(field: str, value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise wrong(field, "an object with an id and a function", value)
    name = read_name(f"{field}.function.name", function.get("name"))
    arguments = _arguments(f"{field}.function.arguments", function.get("arguments"))
    id = value.get("id")
    return {
        "id": "" if id is None else text(f"{field}.id", id),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _arguments(field: str, value: Any) -> str:
    """The text of a call's arguments. It need not be a JSON object: an answer may end inside a call."""
    if isinstance(value, str):
        return text(field, value) or "{}"
    try:
        written = json.dumps({} if value is None else value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise BadRequest(field, f"{field} is nested too deeply") from None
    except ValueError:
        raise BadRequest(field, f"{field} holds a number that JSON does not have") from None
    return text(field, written)
