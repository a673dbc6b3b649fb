"""Anthropic's Messages: /v1/messages, and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Route

from polarlm.engine import Usage
from polarlm.server.driver import Driver
from polarlm.server.http.dialects._shared import arguments_of, items, json_text, members, read_own
from polarlm.server.http.errors import ApiError
from polarlm.server.http.generation import About, Counting, Generation
from polarlm.server.http.streams import NAMED, Event, Framing
from polarlm.server.parameters import Asked
from polarlm.server.pieces import Answer, Piece
from polarlm.server.values import BadRequest, flag, shown, text, wrong

PATHS = ("/v1/messages",)

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SAME_NAMES = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "stream"),
    *("min_p", "seed", "ignore_eos", "cache_prompt", "cache_salt"),  # which Anthropic does not have
)
_NAMES = {
    "stop": "stop_sequences",
    "tool_choice": "tool_choice",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
}  # of fields that are called otherwise here
_REFUSED = {
    "container": "this server runs no containers; leave it out",
    "mcp_servers": "this server connects to no MCP servers; leave it out",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = "x-anthropic-billing-header:"  # begins a block for Anthropic alone, which differs from request to request
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def routes(driver: Driver) -> list[Route]:
    """The endpoints."""
    return [
        Route("/v1/messages", Generation(driver, Messages()).serve, methods=["POST"]),
        Route("/v1/messages/count_tokens", Counting(driver, Messages()).serve, methods=["POST"]),
    ]


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of the response with an error."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


@dataclass(frozen=True)
class Messages:
    """POST /v1/messages"""

    framing: Framing = NAMED

    def read(self, body: dict[str, Any], about: About) -> tuple[Asked, Writer]:
        """The request. Raises BadRequest."""
        asked = read_own(_own(body), _NAMES, about)
        return asked, Writer(about.model.name, about.tells_cached)


# -- reading -----------------------------------------------------------------------------------------------------------


def _own(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body in our own names. Raises BadRequest."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, reason in _REFUSED.items():
        if body.get(name):
            raise BadRequest(name, f"{name}: {reason}")
    own = {name: body[name] for name in _SAME_NAMES if name in body}
    own["messages"] = [*_system(body.get("system", "")), *_messages(body.get("messages"))]
    if "stop_sequences" in body:
        own["stop"] = items("stop_sequences", body["stop_sequences"])
    if tools := [_tool(f"tools[{i}]", tool) for i, tool in enumerate(items("tools", body.get("tools", [])))]:
        own["tools"] = tools
    _check_edits(body.get("context_management", {}))
    return own | _tool_choice(body.get("tool_choice")) | _reasoning(body) | _format(body)


def _system(value: Any) -> list[dict[str, Any]]:
    """The message of the system; none for an empty one."""
    if isinstance(value, str):
        prompt = text("system", value)
    else:
        blocks = [_text(f"system[{index}]", block) for index, block in enumerate(items("system", value))]
        prompt = "".join(block for block in blocks if not block.startswith(_BILLING))
    return [{"place": "system", "role": "system", "content": prompt}] if prompt else []


def _messages(value: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "an array with at least one message", value)
    for index, message in enumerate(value):
        place = f"messages[{index}]"
        message = members(place, message)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{place}.role", "user, assistant or system", role)
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        blocks = [members(f"{place}.content[{i}]", one) for i, one in enumerate(items(f"{place}.content", blocks))]
        found = (_assistant if role == "assistant" else _others)(f"{place}.content", role, blocks)
        yield from ({"place": place, **one} for one in found)


def _assistant(place: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """An answer: its text, its reasoning and its calls."""
    texts, reasoning, calls = "", "", []
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        kind = block.get("type")
        if kind == "thinking":
            reasoning += text(f"{at}.thinking", block.get("thinking"))
        elif kind == "tool_use":
            name = text(f"{at}.name", block.get("name"))
            function = {"name": name, "arguments": json_text(f"{at}.input", block.get("input", {}))}
            calls.append({"id": text(f"{at}.id", block.get("id")), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # nobody but its maker can read it
            texts += _text(at, block)
    message: dict[str, Any] = {"role": role, "content": texts}
    yield message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _others(place: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A message of the user's or the system's; each result of a tool becomes a message of its own, before the text."""
    texts: list[str] = []
    results = 0
    for index, block in enumerate(blocks):
        at = f"{place}[{index}]"
        if block.get("type") != "tool_result":
            texts.append(_text(at, block))
            continue
        results += 1
        yield {
            "role": "tool",
            "tool_call_id": text(f"{at}.tool_use_id", block.get("tool_use_id")),
            "content": _result(f"{at}.content", block.get("content", "")),
        }
    if texts or not results:
        yield {"role": role, "content": "".join(texts)}


def _result(place: str, value: Any) -> str:
    if isinstance(value, str):
        return text(place, value)
    return "".join(_text(f"{place}[{index}]", block) for index, block in enumerate(items(place, value)))


def _text(place: str, value: Any) -> str:
    """The text of a block. Raises BadRequest for blocks that hold something else."""
    block = members(place, value)
    kind = block.get("type")
    if kind != "text":
        named = f"{shown(kind)} blocks are" if isinstance(kind, str) else "a block without a type is"
        raise BadRequest(f"{place}.type", f"{place}.type: {named} not supported here: this server takes text alone")
    return text(f"{place}.text", block.get("text"))


def _tool(place: str, value: Any) -> dict[str, Any]:
    tool = members(place, value)
    if tool.get("type", "custom") != "custom":
        kind = shown(tool["type"])
        raise BadRequest(
            f"{place}.type", f"{place}.type: this server has no tools of its own, such as {kind}; leave it out"
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


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
    """Raises BadRequest for an edit that leaves out something of the conversation."""
    edits = items("context_management.edits", members("context_management", value).get("edits", []))
    for index, edit in enumerate(edits):
        place = f"context_management.edits[{index}]"
        if members(place, edit).get("keep") != "all":
            raise BadRequest(place, f"{place}: this server leaves nothing out of a conversation; leave the edit out")


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the model reasons before it answers; how much is up to the model's template."""
    variables: dict[str, Any] = {}
    if "thinking" in body:
        kind = members("thinking", body["thinking"]).get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise wrong("thinking.type", "enabled, adaptive or disabled", kind)
        if kind != "adaptive":
            variables["enable_thinking"] = kind == "enabled"
    effort = members("output_config", body.get("output_config", {})).get("effort")
    if effort is not None:
        variables["reasoning_effort"] = text("output_config.effort", effort)
    return {"chat_template_kwargs": variables} if variables else {}


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer has to look like."""
    given = members("output_config", body.get("output_config", {})).get("format")
    if given is None:
        return {}
    format = members("output_config.format", given)
    if format.get("type") != "json_schema":
        raise wrong("output_config.format.type", "json_schema", format.get("type"))
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": format.get("schema")}}}


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Makes the JSON objects of one response."""

    model: str
    tells_cached: bool  # whether the usage has the number of cached tokens
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _blocks: int = 0  # that have begun
    _open: str = ""  # the type of the block that is under way

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            if (given := arguments_of(call)) is not None:
                content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        end = _end(answer.finish_reason, answer.stopped_by)
        return self._message(content) | end | {"usage": self._usage(answer.usage)}

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        """The events of a piece; the `first` one has the message's beginning before it."""
        if first:
            usage = {"input_tokens": 0, "output_tokens": 0}  # the counts come at the end
            empty = {"stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": self._message([]) | empty}
            yield {"type": "ping"}
        if piece.reasoning:
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._begin("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})
        if piece.call is not None:
            yield from self._stop()
            yield from self._begin("tool_use", {"id": piece.call.id, "name": piece.call.name, "input": {}})
        if piece.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        if piece.finish_reason is not None:
            assert piece.usage is not None
            yield from self._stop()
            end = _end(piece.finish_reason, piece.stopped_by)
            yield {"type": "message_delta", "delta": end, "usage": self._usage(piece.usage)}

    def ending(self, usages: Sequence[Usage]) -> Iterator[Event]:
        """The event after the end."""
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Event:
        """The last event of a stream that an error ends."""
        return error_body(error)

    def _begin(self, kind: str, empty: Mapping[str, Any]) -> Iterator[Event]:
        """The events up to the beginning of a block of this type, unless it is under way."""
        if self._open == kind:
            return
        yield from self._stop()
        block = {"type": kind, **empty}
        yield {"type": "content_block_start", "index": self._blocks, "content_block": block}
        self._open = kind
        self._blocks += 1

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> Iterator[Event]:
        """The end of the block that is under way."""
        if self._open:
            yield {"type": "content_block_stop", "index": self._blocks - 1}
        self._open = ""

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Tokens that were read from the cache do not count as input."""
        cached = usage.cached_tokens if self.tells_cached else 0
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


def _end(reason: str, stopped_by: str | None) -> dict[str, Any]:
    """Why the message ends."""
    stop = "stop_sequence" if stopped_by is not None else _STOP_REASONS[reason]
    return {"stop_reason": stop, "stop_sequence": stopped_by}
