"""Tools of OpenAI's Responses: functions, which may be in namespaces, and OpenAI's own tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polarlm.server.http.dialects._shared import Places, items, members
from polarlm.server.reading.tools import in_namespace
from polarlm.server.reading.values import text


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a request; functions have names that include their namespaces."""

    tools: list[dict[str, Any]] = field(default_factory=list)  # functions in our own names, others as sent
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)  # our name → namespace, name

    def named(self, name: str) -> dict[str, str]:
        """The fields of a call that name the function `name`."""
        namespace, inner = self.namespaced.get(name, ("", name))
        return {"name": inner, "namespace": namespace} if namespace else {"name": name}


def read_response_tools(value: Any) -> ResponseTools:
    """The tools of a request. Raises BadRequest."""
    found = ResponseTools()
    for at, tool, namespace in _each("tools", value):
        if tool.get("type", "function") != "function":
            found.tools.append({**tool, "places": Places({"": at})})
            continue
        function = {name: member for name, member in tool.items() if name != "type"}
        if namespace:
            function["name"] = in_namespace(namespace, name := text(f"{at}.name", tool.get("name")))
            found.namespaced[function["name"]] = namespace, name
        found.tools.append({"type": "function", "function": function, "places": Places({".function": at})})
    return found


def _each(field: str, value: Any, namespace: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path of the field, tool, its namespace) of each tool."""
    for index, one in enumerate(items(field, value)):
        at = f"{field}[{index}]"
        tool = members(at, one)
        if tool.get("type") == "namespace" and not namespace:
            yield from _each(f"{at}.tools", tool.get("tools", []), text(f"{at}.name", tool.get("name")))
        else:
            yield at, tool, namespace


def named_function(at: str, given: Mapping[str, Any]) -> str:
    """Our name of the function that a call or a choice names. Raises BadRequest."""
    name = text(f"{at}.name", given.get("name"))
    return in_namespace(text(f"{at}.namespace", given["namespace"]), name) if "namespace" in given else name


def read_choice(value: Any) -> dict[str, Any]:
    """The `tool_choice` of a request, in our own names. Raises BadRequest."""
    if value is None or isinstance(value, str):
        return {} if value is None else {"tool_choice": value}
    choice = members("tool_choice", value)
    kind = choice.get("type")
    if kind == "allowed_tools":
        some = [(at, tool) for at, tool, _ in _each("tool_choice.tools", choice.get("tools"))]
        tools = [_function(at, tool) if tool.get("type") == "function" else tool for at, tool in some]
        return {"tool_choice": {"type": kind, kind: {"mode": choice.get("mode"), "tools": tools}}}
    return {"tool_choice": _function("tool_choice", choice) if kind == "function" else choice}


def _function(at: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": named_function(at, given)}}
