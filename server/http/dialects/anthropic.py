"""Anthropic's Messages: /v1/messages, and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from polarlm.server.http.dialects._anthropic_events import MessageWriter, error_body
from polarlm.server.http.dialects._shared import Places, items, located, members, read_own, refuse
from polarlm.server.http.generation import About, Counting, Endpoint, Generation
from polarlm.server.http.streams import NAMED
from polarlm.server.reading.fields import given
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.sampling import EXTENSIONS
from polarlm.server.reading.values import BadRequest, flag, text, wrong
from polarlm.server.running.driver import Driver

__all__ = ["PATHS", "error_body", "routes"]

PATHS = ("/v1/messages",)

_NAMES = {
    "stop": "stop_sequences",
    "tool_choice": "tool_choice",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}  # our name of a field → Anthropic's
_SAME_NAMES = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "stream"),
    *(name for name in EXTENSIONS if name not in _NAMES),  # not in Anthropic's API
)
_REFUSED = {
    "container": "this server runs no containers; leave it out",
    "mcp_servers": "this server connects to no MCP servers; leave it out",
}
_KNOWN = {
    *(*_SAME_NAMES, *_REFUSED, "stop_sequences", "messages", "system", "tools", "tool_choice", "thinking"),
    *("output_config", "context_management"),
    # Fields without an effect here:
    *("betas", "metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "compaction"),
    *("user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token", "thread"),
    *("anthropic_version", "anthropic_beta"),  # sent by clients that are made for other hosts of the API
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = "x-anthropic-billing-header:"  # begins a block that is for Anthropic only and changes with every request


def routes(driver: Driver) -> list[Route]:
    return [
        Route("/v1/messages", Generation(driver, Messages()).serve, methods=["POST"]),
        Route("/v1/messages/count_tokens", Counting(driver, Messages()).serve, methods=["POST"]),
    ]


class Messages(Endpoint):
    """POST /v1/messages"""

    framing = NAMED
    known = _KNOWN

    def read(self, body: dict[str, Any], about: About) -> tuple[ParsedRequest, MessageWriter]:
        asked = read_own(_own(body), _NAMES, about)
        return asked, MessageWriter(about.model.name, about.tells_cached)


def _own(body: Mapping[str, Any]) -> dict[str, Any]:
    body = given(body)
    refuse(body, _REFUSED)
    own = {name: body[name] for name in _SAME_NAMES if name in body}
    own["messages"] = [*_system(body.get("system", "")), *_messages(body.get("messages"))]
    if "stop_sequences" in body:
        own["stop"] = items("stop_sequences", body["stop_sequences"])
    if tools := [_tool(f"tools[{i}]", tool) for i, tool in enumerate(items("tools", body.get("tools", [])))]:
        own["tools"] = tools
    _check_edits(body.get("context_management", {}))
    return own | _tool_choice(body.get("tool_choice")) | _reasoning(body) | _format(body)


def _system(value: Any) -> list[dict[str, Any]]:
    """The system message; no message for an empty one."""
    if not isinstance(value, (str, list)):
        raise wrong("system", "a string or an array of text blocks", value)
    prompt = value
    if isinstance(value, list):
        texts = (block.get("text") if isinstance(block, dict) else None for block in value)
        prompt = [one for one, text in zip(value, texts, strict=True) if not str(text).startswith(_BILLING)]
    return [{"places": Places({"": "system"}), "role": "system", "content": prompt}] if prompt else []


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "an array with at least one message", value)
    return located("messages", value)


def _tool(place: str, value: Any) -> dict[str, Any]:
    tool = members(place, value)
    if tool.get("type", "custom") != "custom" and "input_schema" not in tool:  # one of Anthropic's own
        return tool | {"places": Places({"": place})}
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if "description" in tool:
        function["description"] = tool["description"]
    places = Places({".function": place, ".function.parameters": f"{place}.input_schema"})
    return {"type": "function", "function": function, "places": places}


def _tool_choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    choice = members("tool_choice", value)
    kind = choice.get("type")
    own: dict[str, Any] = {}
    if kind == "tool":
        own["tool_choice"] = {"type": "function", "function": {"name": text("tool_choice.name", choice.get("name"))}}
    elif isinstance(kind, str) and kind in _CHOICES:
        own["tool_choice"] = _CHOICES[kind]
    else:
        raise wrong("tool_choice.type", f"tool, {', '.join(_CHOICES)}", kind)
    if "disable_parallel_tool_use" in choice:
        disabled = flag("tool_choice.disable_parallel_tool_use", choice["disable_parallel_tool_use"])
        own["parallel_tool_calls"] = not disabled
    return own


def _check_edits(value: Any) -> None:
    """Raises BadRequest for an edit that removes a part of the conversation."""
    edits = items("context_management.edits", members("context_management", value).get("edits", []))
    for index, edit in enumerate(edits):
        place = f"context_management.edits[{index}]"
        if members(place, edit).get("keep") != "all":
            raise BadRequest(place, f"{place}: this server leaves nothing out of a conversation; leave the edit out")


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    """The template's variables that say whether the model reasons before it answers, and with which effort."""
    variables: dict[str, Any] = {}
    if "thinking" in body:
        kind = members("thinking", body["thinking"]).get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise wrong("thinking.type", "enabled, adaptive or disabled", kind)
        if kind != "adaptive":
            variables["enable_thinking"] = kind == "enabled"
    effort = members("output_config", body.get("output_config", {})).get("effort")
    if effort:
        variables["reasoning_effort"] = text("output_config.effort", effort)
    return {"chat_template_kwargs": variables} if variables else {}


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = members("output_config", body.get("output_config", {})).get("format")
    if not wanted:
        return {}
    format = members("output_config.format", wanted)
    if format.get("type") != "json_schema":
        raise wrong("output_config.format.type", "json_schema", format.get("type"))
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": format.get("schema")}}}
