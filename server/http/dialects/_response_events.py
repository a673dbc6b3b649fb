"""The tools of OpenAI's Responses, and their writer: an object with items, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine import TokenLogprob, Usage
from polarlm.engine.parsing.pieces import Answer, CallStart, Piece
from polarlm.server.http.dialects._shared import FieldPaths, arguments_of, members
from polarlm.server.http.errors import TOO_LONG, ApiError
from polarlm.server.http.generation import Writer
from polarlm.server.http.openai.logprobs import ChatLogprobs
from polarlm.server.http.streams import Event
from polarlm.server.reading.edits import seal
from polarlm.server.reading.tools import in_namespace
from polarlm.server.reading.values import array, text

NameFields = Mapping[str, dict[str, str]]
"""Our name of a function in a namespace → fields with its name and namespace."""

# Kind of item → prefix of its id.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc", "compaction": "cmp"}


def _new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


@dataclass
class _Item:
    kind: str
    id: str
    call: CallStart | None = None
    name_fields: dict[str, str] = field(default_factory=dict)  # the name of the call, and its namespace
    text: list[str] = field(default_factory=list)  # for a call: its arguments, or its input
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def said(self) -> str:
        """The name of what a call says."""
        return "input" if self.kind == "custom_tool_call" else "arguments"

    def to_json(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            return item | {"call_id": self.call.id, **self.name_fields, self.said: "".join(self.text)}
        if self.kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
        return item | {"content": [] if status == "in_progress" else [self.part()]}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": "".join(self.text)}
        return {"type": "output_text", "text": "".join(self.text), "annotations": [], "logprobs": self.logprobs}


@dataclass
class ResponseWriter(Writer):
    model: str
    tells_cached: bool  # whether the usage has the number of cached tokens
    repeated: Mapping[str, Any]  # fields of the request that a response repeats
    logprobs: ChatLogprobs | None  # writes log-probabilities, if requested
    name_fields: NameFields
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    keep: Callable[[list[dict[str, Any]]], None] = lambda output: None  # called with the items of the whole answer
    created: int = field(default_factory=lambda: int(time.time()))
    _output: list[dict[str, Any]] = field(default_factory=list)  # complete items
    _open: _Item | None = None
    _tokens: list[TokenLogprob] = field(default_factory=list)  # tokens whose text has not been written yet
    _number: int = 0  # sequence number of the next event

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed: the response in the last event of a stream."""
        (answer,) = answers
        calls = [
            Piece(call=CallStart(index, call.id, call.name), arguments=call.arguments, is_custom=call.is_custom)
            for index, call in enumerate(answer.calls)
        ]
        last = Piece(finish_reason=answer.finish_reason, usage=answer.usage)
        begin = Piece(answer.text, answer.reasoning, logprobs=answer.logprobs, summary=answer.summary)
        events = [event for piece in (begin, *calls, last) for event in self.events(0, piece, first=False)]
        assert events[-1] is not None
        response: dict[str, Any] = events[-1]["response"]
        return response

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        """The events of a piece; before the `first` piece, the events that begin the response."""
        if first:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response("in_progress"))
        if piece.summary:
            item = {"type": "compaction", "id": _new_id("compaction"), "encrypted_content": seal(piece.summary.text)}
            for name in ("added", "done"):
                yield self._event(f"response.output_item.{name}", item=item, **self._place())
            self._output.append(item)
        self._tokens += piece.logprobs
        if piece.reasoning:
            yield from self._begin("reasoning")
            yield from self._delta("reasoning_text", piece.reasoning, content_index=0)
        if piece.text:
            yield from self._begin("message")
            tokens = self.logprobs.write(self._tokens)["content"] if self.logprobs else []
            self._tokens = []
            assert self._open is not None
            self._open.logprobs += tokens
            yield from self._delta("output_text", piece.text, content_index=0, logprobs=tokens)
        if piece.call is not None:
            yield from self._end("completed")
            yield from self._begin("custom_tool_call" if piece.is_custom else "function_call", piece.call)
        if piece.arguments:
            assert self._open is not None
            yield from self._delta(f"{self._open.kind}_{self._open.said}", piece.arguments)
        if piece.finish_reason is not None:
            assert piece.usage is not None
            status = "incomplete" if piece.finish_reason == "length" else "completed"
            if piece.finish_reason != "compaction" and all(item["type"] == "compaction" for item in self._output):
                yield from self._begin("message" if self._open is None else self._open.kind)
            is_cut = piece.finish_reason != "tool_calls" and self._open is not None and self._open.call is not None
            yield from self._end("incomplete" if is_cut else status)
            self.keep(self._output)
            yield self._event(f"response.{status}", response=self._response(status, piece.usage))

    def failure(self, error: ApiError) -> Event:
        code = TOO_LONG if error.code == TOO_LONG else "server_error"
        error_fields = {"error": {"code": code, "message": error.message_for("openai")}}
        return self._event("response.failed", response=self._response("failed") | error_fields)

    def _begin(self, kind: str, call: CallStart | None = None) -> Iterator[Event]:
        """The events up to the beginning of an item of this kind; none if that is the current item's kind."""
        if self._open is not None and self._open.kind == kind:
            return
        yield from self._end("completed")
        name_fields = {} if call is None else self.name_fields.get(call.name, {"name": call.name})
        self._open = _Item(kind, _new_id(kind), call, name_fields)
        yield self._event("response.output_item.added", item=self._open.to_json("in_progress"), **self._place())
        if call is None:
            yield self._item_event("response.content_part.added", content_index=0, part=self._open.part())

    def _delta(self, name: str, delta: str, **more: Any) -> Iterator[Event]:
        assert self._open is not None
        self._open.text.append(delta)
        yield self._item_event(f"response.{name}.delta", delta=delta, **more)

    def _end(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        text = "".join(item.text)
        if item.call is not None:
            members = {item.said: text}
            if item.kind == "function_call":
                status = "completed" if arguments_of(text) is not None else "incomplete"
                members["name"] = item.name_fields["name"]
            yield self._item_event(f"response.{item.kind}_{item.said}.done", **members)
        else:
            logprobs = {"logprobs": item.logprobs} if item.kind == "message" else {}
            name = "output_text" if item.kind == "message" else "reasoning_text"
            yield self._item_event(f"response.{name}.done", content_index=0, text=text, **logprobs)
            yield self._item_event("response.content_part.done", content_index=0, part=item.part())
        item_json = item.to_json(status)
        yield self._event("response.output_item.done", item=item_json, **self._place())
        self._output.append(item_json)
        self._open = None

    def _place(self) -> dict[str, int]:
        return {"output_index": len(self._output)}

    def _item_event(self, name: str, /, **fields: Any) -> Event:
        assert self._open is not None
        return self._event(name, item_id=self._open.id, **self._place(), **fields)

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}

    def _response(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "model": self.model,
            "output": list(self._output),
            "tools": [],
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            **self.repeated,
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens if self.tells_cached else 0,
                "cache_write_tokens": 0,
                **({"reread": usage.reread._asdict()} if usage.reread and self.tells_cached else {}),
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


@dataclass
class CompactionWriter(ResponseWriter):
    kept: list[dict[str, Any]] = field(default_factory=list)  # items before the compaction

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        response = super().whole(answers)
        fields = {name: response[name] for name in ("id", "created_at", "usage")}
        return {**fields, "object": "response.compaction", "output": [*self.kept, *response["output"]]}


def read_tools(field: str, value: Any) -> list[dict[str, Any]] | None:
    """Functions in our own names, which include their namespaces, and other tools as sent. Raises BadRequest."""
    tools: list[dict[str, Any]] = []
    for at, tool, namespace in _each_tool(field, value):
        kind = tool.get("type", "function")
        if kind not in ("function", "custom"):
            tools.append({**tool, "paths": FieldPaths({"": at})})
            continue
        ours: dict[str, Any] = {name: member for name, member in tool.items() if name != "type"}
        if kind == "custom" and isinstance(format := ours.get("format"), dict) and format.get("type") == "grammar":
            ours["format"] = {"type": "grammar", "grammar": format}
        paths = FieldPaths({f".{kind}": at, f".{kind}.format.grammar": f"{at}.format"})
        tools.append({"type": kind, kind: ours, "paths": paths})
        if namespace:
            name = text(f"{at}.name", tool.get("name"))
            ours["name"] = in_namespace(namespace, name)
            tools[-1]["name_fields"] = {"name": name, "namespace": namespace}
    return tools or None


def name_fields_of(tools: Iterable[Mapping[str, Any]]) -> NameFields:
    kinds = [(tool["type"], tool) for tool in tools if tool.get("type") in ("function", "custom")]
    return {tool[kind]["name"]: tool["name_fields"] for kind, tool in kinds if "name_fields" in tool}


def _each_tool(field: str, value: Any, namespace: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path of the field, tool, its namespace) of each tool."""
    for index, one in enumerate(array(field, value)):
        at = f"{field}[{index}]"
        tool = members(at, one)
        if tool.get("type") == "namespace" and not namespace:
            yield from _each_tool(f"{at}.tools", tool.get("tools", []), text(f"{at}.name", tool.get("name")))
        else:
            yield at, tool, namespace


def read_choice(field: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    choice = members(field, value)
    kind = choice.get("type")
    if kind == "allowed_tools":
        listed_tools = [(at, tool) for at, tool, _ in _each_tool(f"{field}.tools", choice.get("tools"))]
        tools = [_read_named_tool(at, tool) for at, tool in listed_tools]
        inner = {"mode": choice.get("mode"), "tools": tools}
        return {"type": kind, kind: inner, "paths": FieldPaths({f".{kind}": field})}
    return _read_named_tool(field, choice)


def _read_named_tool(at: str, value: dict[str, Any]) -> dict[str, Any]:
    """The name of a function or of a custom tool in our own names; other choices as sent."""
    kind = value.get("type")
    if kind not in ("function", "custom"):
        return value
    name = text(f"{at}.name", value.get("name"))
    if "namespace" in value:
        name = in_namespace(text(f"{at}.namespace", value["namespace"]), name)
    return {"type": kind, kind: {"name": name}}
