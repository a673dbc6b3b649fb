"""Anthropic's Messages: /v1/messages, and /v1/messages/count_tokens."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.routing import Route

from polarlm.engine import Usage
from polarlm.engine.parsing.pieces import Answer, Piece, Summary
from polarlm.server.http.dialects._shared import FieldPaths, FieldTable, arguments_of, members, objects_with_paths
from polarlm.server.http.errors import ApiError
from polarlm.server.http.generation import Endpoint, Generation, ModelInfo, Writer
from polarlm.server.http.streams import NAMED, Event
from polarlm.server.reading.edits import INSTRUCTION, ClearThinking, ClearToolUses, Compaction, Edit
from polarlm.server.reading.fields import duplicate_warning, requested_fields
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.sampling import EXTENSIONS
from polarlm.server.reading.values import LARGEST, BadRequest, array, count, flag, one_of, text, wrong_value
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver

PATHS = ("/v1/messages",)

_TTLS = {"5m": 300, "1h": 3600}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BILLING = "x-anthropic-billing-header:"  # begins a block that is for Anthropic only and changes with every request


def routes(driver: Driver) -> list[Route]:
    generation = Generation(driver, Messages())
    return [
        Route("/v1/messages", generation.serve, methods=["POST"]),
        Route("/v1/messages/count_tokens", generation.count, methods=["POST"]),
    ]


def _read_system(field: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, (str, list)):
        raise wrong_value(field, "a string or an array of text blocks", value)
    prompt = value
    if isinstance(value, list):
        texts = (block.get("text") if isinstance(block, dict) else None for block in value)
        prompt = [one for one, text in zip(value, texts, strict=True) if not str(text).startswith(_BILLING)]
    return [{"paths": FieldPaths({"": field}), "role": "system", "content": prompt}] if prompt else []


def _read_messages(field: str, value: Any) -> list[dict[str, Any]]:
    return objects_with_paths(field, array(field, value, "an array with at least one message", 1))


def _read_tools(field: str, value: Any) -> list[dict[str, Any]] | None:
    return [_read_tool(f"{field}[{i}]", tool) for i, tool in enumerate(array(field, value))] or None


def _read_tool(path: str, value: Any) -> dict[str, Any]:
    tool = members(path, value)
    if tool.get("type", "custom") != "custom" and "input_schema" not in tool:  # one of Anthropic's own
        return tool | {"paths": FieldPaths({"": path})}
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if "description" in tool:
        function["description"] = tool["description"]
    paths = FieldPaths({".function": path, ".function.parameters": f"{path}.input_schema"})
    return {"type": "function", "function": function, "paths": paths}


def _read_choice(field: str, value: Any) -> Any:
    if not (choice := members(field, value)):
        return None
    kind = one_of(f"{field}.type", choice.get("type"), ("tool", *_CHOICES))
    if kind == "tool":
        return {"type": "function", "function": {"name": text(f"{field}.name", choice.get("name"))}}
    return _CHOICES[kind]


def _read_edits(field: str, value: Any) -> list[Edit]:
    edits: list[Edit] = []
    kinds: list[str] = []
    for index, one in enumerate(array(field, value)):
        path = f"{field}[{index}]"
        kinds.append(one_of(f"{path}.type", members(path, one).get("type"), tuple(_EDITS)))
        if kinds[-1] in kinds[:-1] or (kinds[-1] == _CLEAR_THINKING and index):
            sentence = f"{path}: each edit comes once, and {_CLEAR_THINKING} before the others"
            raise BadRequest(path, sentence)
        edits += filter(None, [_EDITS[kinds[-1]](path, members(path, one))])
    return edits


def _read_clear_thinking(path: str, edit: dict[str, Any]) -> ClearThinking | None:
    keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
    if keep in ("all", {"type": "all"}):
        return None
    return ClearThinking(_amount(f"{path}.keep", keep, ("thinking_turns",))[1])


def _read_clear_tool_uses(path: str, edit: dict[str, Any]) -> ClearToolUses:
    trigger = edit.get("trigger", {"type": "input_tokens", "value": _CLEAR_ABOVE})
    kind, value = _amount(f"{path}.trigger", trigger, ("input_tokens", "tool_uses"))
    keep = edit.get("keep", {"type": "tool_uses", "value": 3})
    least = edit.get("clear_at_least", {"type": "input_tokens", "value": 0})
    inputs = edit.get("clear_tool_inputs", False)
    return ClearToolUses(
        tokens=value if kind == "input_tokens" else None,
        calls=value,
        keep=_amount(f"{path}.keep", keep, ("tool_uses",), 0)[1],
        least=_amount(f"{path}.clear_at_least", least, ("input_tokens",), 0)[1],
        excluded=_names(f"{path}.exclude_tools", edit.get("exclude_tools", [])),
        inputs=inputs if isinstance(inputs, bool) else _names(f"{path}.clear_tool_inputs", inputs),
    )


def _read_compact(path: str, edit: dict[str, Any]) -> Compaction:
    trigger = edit.get("trigger", {"type": "input_tokens", "value": _COMPACT_ABOVE})
    pauses = flag(f"{path}.pause_after_compaction", edit.get("pause_after_compaction", False))
    threshold = _amount(f"{path}.trigger", trigger, ("input_tokens",))[1]
    return Compaction(_instruction(path, edit), threshold, goes_on=not pauses)


def _read_compaction(field: str, value: Any) -> Compaction:
    """The compaction of a request that asks for nothing else."""
    compaction = members(field, value)
    one_of(f"{field}.type", compaction.get("type"), ("summarize",))
    return Compaction(_instruction(field, compaction))


def _instruction(path: str, edit: dict[str, Any]) -> str:
    instruction = text(f"{path}.instructions", edit.get("instructions", ""))
    return instruction if instruction.strip() else INSTRUCTION


def _amount(field: str, value: Any, kinds: tuple[str, ...], least: int = 1) -> tuple[str, int]:
    """The type and the value of an object such as {"type": "input_tokens", "value": 5}."""
    amount = members(field, value)
    kind = one_of(f"{field}.type", amount.get("type"), kinds)
    return kind, count(f"{field}.value", amount.get("value"), least, LARGEST)


def _names(field: str, value: Any) -> list[str]:
    return [text(f"{field}[{index}]", name) for index, name in enumerate(array(field, value))]


_CLEAR_THINKING, _CLEAR_TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
_CLEAR_ABOVE, _COMPACT_ABOVE = 100_000, 150_000  # tokens, as at Anthropic
_EDITS: Mapping[str, Callable[[str, dict[str, Any]], Edit | None]] = {
    _CLEAR_THINKING: _read_clear_thinking,
    _CLEAR_TOOL_USES: _read_clear_tool_uses,
    "compact_20260112": _read_compact,
}


def _read_thinking(field: str, value: Any) -> dict[str, Any] | None:
    """The template's variable that says whether the model reasons before it answers."""
    if not (thinking := members(field, value)):
        return None
    kind = one_of(f"{field}.type", thinking.get("type"), ("enabled", "adaptive", "disabled"))
    return None if kind == "adaptive" else {"enable_thinking": kind == "enabled"}


def _read_effort(field: str, value: Any) -> dict[str, Any] | None:
    """The template's variable for the effort of reasoning."""
    return {"reasoning_effort": text(field, value)} if value else None


def _kept_seconds(body: Mapping[str, Any]) -> Iterator[int]:
    """The times of every `cache_control` in a body. Raises BadRequest."""
    parts = [("", body)]
    for name in ("system", "tools", "messages"):
        parts += [(f"{name}[{i}]", one) for i, one in enumerate(body.get(name) or ()) if isinstance(one, dict)]
    for path, part in parts:
        content = part.get("content")
        inner = enumerate(content) if isinstance(content, list) else ()
        for at, one in ((path, part), *((f"{path}.content[{i}]", one) for i, one in inner if isinstance(one, dict))):
            if control := members(f"{at}.cache_control", one.get("cache_control") or {}):
                yield _TTLS[one_of(f"{at}.cache_control.ttl", control.get("ttl", "5m"), tuple(_TTLS))]


def _read_format(field: str, value: Any) -> dict[str, Any] | None:
    if not value:
        return None
    format = members(field, value)
    one_of(f"{field}.type", format.get("type"), ("json_schema",))
    inner = {"schema": format.get("schema")}
    return {"type": "json_schema", "json_schema": inner, "paths": FieldPaths({".json_schema": field})}


TABLE = FieldTable(
    "anthropic",
    ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", *EXTENSIONS),
    ("system", "messages", _read_system),
    ("messages", "messages", _read_messages),
    ("stop_sequences", "stop", array),
    ("tools", "tools", _read_tools),
    ("context_management.edits", "edits", _read_edits),
    ("compaction", "compaction", _read_compaction),
    ("tool_choice", "tool_choice", _read_choice),
    ("tool_choice.disable_parallel_tool_use", "parallel_tool_calls", lambda field, value: not flag(field, value)),
    ("thinking", "chat_template_kwargs", _read_thinking),
    ("thinking.budget_tokens", "reasoning_budget_tokens"),
    ("output_config.effort", "chat_template_kwargs", _read_effort),
    ("output_format", "response_format", _read_format),  # its name in the beta
    ("output_config.format", "response_format", _read_format),
    ("context_management.in_place", "in_place", flag),
    ("diagnostics.previous_message_id", "", text),
    ("cache_control", ""),
)


class Messages(Endpoint):
    framing = NAMED
    known = TABLE.known

    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, MessageWriter]:
        body = requested_fields(body)
        TABLE.refuse(body)
        ours = TABLE.translate({"messages": None} | body)
        request = TABLE.read(ours, info)
        options = replace(request.options, keep_seconds=max(_kept_seconds(body), default=0))
        edits, compaction = tuple(ours.get("edits", ())), ours.get("compaction")
        in_place = ours.get("in_place")
        request = replace(request, options=options, edits=edits, compaction=compaction, in_place=in_place)
        writer = MessageWriter(info.name, info.tells_cached, has_edits="edits" in ours)
        if entry := journal.current():
            entry.response, diagnostics = writer.id, members("diagnostics", body.get("diagnostics", {}))
            entry.previous_response = diagnostics.get("previous_message_id")
            writer.entry = entry if info.tells_cached and "diagnostics" in body else None
        return request, writer

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        config, older = body.get("output_config"), body.get("output_format")
        is_given = isinstance(config, dict) and config.get("format") not in (None, {}, older)
        ignored = [duplicate_warning("output_config.format", "output_format")] if older and is_given else []
        return super().warnings(body) + ignored


_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The reasons that prompts differ for → what begins the names of such differences.
_MISSES = {
    "model_changed": "adapter",
    "system_changed": r"messages\[0\].*\(system\)",
    "tools_changed": r"tools",
    "messages_changed": r"messages",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "compaction": "compaction"}


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message_for("anthropic")}}


@dataclass
class MessageWriter(Writer):
    error_body = error_body

    model: str
    tells_cached: bool  # whether the usage has the number of cached tokens
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    entry: journal.Entry | None = None  # has the comparison with an earlier prompt, if the client asks for it
    _blocks: int = 0  # blocks that have begun
    _open: str = ""  # the type of the current block
    _summary: Summary | None = None
    has_edits: bool = False  # whether the request has some

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.summary:
            self._summary = answer.summary
            content.append({"type": "compaction", "content": answer.summary.text})
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": parse_partial(call.arguments)}
            )
        end = _end(answer.finish_reason, answer.stopped_by)
        return self._message(content) | end | {"usage": self._usage_of(answer)} | self._context()

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        """The events of a piece; before the `first` piece, the events that begin the message."""
        if first:
            usage = self._usage(piece.prompt_tokens, piece.cached_tokens, 0)
            empty = {"stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": self._message([]) | empty}
            yield {"type": "ping"}
        if piece.summary:
            self._summary = piece.summary
            yield from self._begin("compaction", {"content": None})
            yield self._delta({"type": "compaction_delta", "content": piece.summary.text})
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
            yield {"type": "message_delta", "delta": end, "usage": self._usage_of(piece)} | self._context()

    def ending(self, usages: Sequence[Usage]) -> Iterator[Event]:
        yield {"type": "message_stop"}

    def _begin(self, kind: str, empty: Mapping[str, Any]) -> Iterator[Event]:
        """The events up to the beginning of a block of type `kind`; none if that is the current block's type."""
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
        if self._open:
            yield {"type": "content_block_stop", "index": self._blocks - 1}
        self._open = ""

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        return message if self.entry is None else message | {"diagnostics": _diagnosis(self.entry)}

    def _context(self) -> dict[str, Any]:
        """What says which edits were done, if the request has some."""
        applied = [
            {"type": _CLEAR_THINKING, "cleared_thinking_turns": number, "cleared_input_tokens": tokens}
            if isinstance(one, ClearThinking)
            else {"type": _CLEAR_TOOL_USES, "cleared_tool_uses": number, "cleared_input_tokens": tokens}
            for one, number, tokens in (self.edited.cleared if self.edited else ())
        ]
        return {"context_management": {"applied_edits": applied}} if self.has_edits else {}

    def _usage_of(self, end: Answer | Piece) -> dict[str, Any]:
        """The usage of what ends so; that of a summary counts apart."""
        is_alone = end.finish_reason == "compaction"
        assert end.usage is not None
        usages = [] if is_alone else [("message", end.usage)]
        total = self._usage(0, 0, 0) if is_alone else self._counts(end.usage)
        if self._summary is None:
            return total
        usages.insert(0, ("compaction", self._summary.usage))
        return total | {"iterations": [{"type": kind, **self._counts(usage)} for kind, usage in usages]}

    def _counts(self, usage: Usage) -> dict[str, Any]:
        reread = {"reread": usage.reread._asdict()} if usage.reread and self.tells_cached else {}
        return self._usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) | reread

    def _usage(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
        """The usage; tokens that were read from the cache do not count as input."""
        cached_tokens = cached_tokens if self.tells_cached else 0
        return {
            "input_tokens": prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": output_tokens,
        }


def _diagnosis(entry: journal.Entry) -> dict[str, Any] | None:
    """Why a prompt does not go on from the one whose response the client names; None if it does, or none is named."""
    comparison, id = entry.comparison, entry.previous_response
    if id is None:
        return None
    if comparison is None or comparison.earlier is None or comparison.earlier.response != id:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    missed, places = comparison.earlier.prompt - comparison.at, comparison.places
    if missed <= 0:
        return None
    for kind, pattern in _MISSES.items():
        if any(re.match(pattern, place) for place in places):
            return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": missed}}
    return {"cache_miss_reason": {"type": "unavailable"}}


def _end(reason: str, stopped_by: str | None) -> dict[str, Any]:
    stop = "stop_sequence" if stopped_by is not None else _STOP_REASONS[reason]
    return {"stop_reason": stop, "stop_sequence": stopped_by}


# A string, a sign, or a number or a word.
_PART = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[-+.\w]+)')
_SCALAR = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|true|false|null")


def parse_partial(text: str) -> dict[str, Any]:
    """The JSON object that `text` begins, with only the members and values that are complete: Anthropic's clients read
    a call that is cut off in a stream in this way."""
    at = end = 0
    closers = rest = ""  # brackets that close what is open, at `at` and at `end`
    sign = ""  # the last part, if it is : or ,
    while match := _PART.match(text, at):
        part, at = match[1], match.end()
        if part in ":,":
            sign = part
            continue
        if part in "{[":
            closers = ("}" if part == "{" else "]") + closers
        elif part in "}]":
            closers = closers[1:]
        elif part[0] == '"' and closers[0] == "}" and sign != ":":
            continue  # a name, whose value may be missing
        elif part[0] != '"' and not _SCALAR.fullmatch(part):
            break
        sign, end, rest = "", at, closers
    return arguments_of(text[:end] + rest) or {}
