"""Tools of OpenAI's Responses: functions, which may be in namespaces. OpenAI's own tools are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polarlm.server.http.dialects._shared import Places, items, members
from polarlm.server.reading.values import shown, text, wrong

_BETWEEN = "__"  # separates namespace and function in our name of a function


@dataclass(frozen=True)
class ResponseTools:
    """The functions of a request, under names that include their namespaces."""

    functions: list[dict[str, Any]] = field(default_factory=list)  # in our own names
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)  # our name → namespace, name
    left_out: list[str] = field(default_factory=list)  # types of the tools that are not functions

    def named(self, name: str) -> dict[str, str]:
        """The fields of a call that name the function `name`."""
        namespace, inner = self.namespaced.get(name, ("", name))
        return {"name": inner, "namespace": namespace} if namespace else {"name": name}


def read_response_tools(value: Any) -> ResponseTools:
    """The tools of a request. Raises BadRequest."""
    found = ResponseTools()
    for at, tool, namespace in _each("tools", value):
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise wrong(f"{at}.type", "function, namespace, or the name of another type", kind)
        if kind != "function":
            found.left_out.append(kind)
            continue
        function = {name: member for name, member in tool.items() if name != "type"}
        if namespace:
            function["name"] = _joined(namespace, name := text(f"{at}.name", tool.get("name")))
            found.namespaced[function["name"]] = namespace, name
        found.functions.append({"type": "function", "function": function, "places": Places({".function": at})})
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
    return _joined(text(f"{at}.namespace", given["namespace"]), name) if "namespace" in given else name


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}{_BETWEEN}{name}"


def read_choice(value: Any) -> dict[str, Any]:
    """The `tool_choice` of a request, in our own names. Raises BadRequest."""
    if value is None or isinstance(value, str):
        return {} if value is None else {"tool_choice": value}
    choice = members("tool_choice", value)
    kind = choice.get("type")
    if kind == "allowed_tools":
        some = [(at, tool) for at, tool, _ in _each("tool_choice.tools", choice.get("tools"))]
        functions = [_function(at, tool) for at, tool in some if tool.get("type") == "function"]
        return {"tool_choice": {"type": kind, kind: {"mode": choice.get("mode"), "tools": functions}}}
    if kind != "function":
        raise wrong("tool_choice.type", "function or allowed_tools", kind)
    return {"tool_choice": _function("tool_choice", choice)}


def _function(at: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a choice, in our own names. Raises BadRequest."""
    return {"type": "function", "function": {"name": named_function(at, given)}}


def left_out(body: Mapping[str, Any]) -> list[str]:
    """A sentence about the tools that are left out of a validated request; an empty list if there are none."""
    kinds = dict.fromkeys(read_response_tools(body.get("tools") or []).left_out)
    return [f"tools of type {', '.join(map(shown, kinds))} are left out: only functions are called"] if kinds else []
