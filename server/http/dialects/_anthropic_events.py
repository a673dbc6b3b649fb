"""The writer of Anthropic's Messages: a message of blocks, whole or as a stream of events."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine import Usage
from polarlm.server.answers.pieces import Answer, Piece
from polarlm.server.http.errors import ApiError
from polarlm.server.http.generation import Writer
from polarlm.server.http.streams import Event

_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.told("anthropic")}}


@dataclass
class MessageWriter(Writer):
    model: str
    tells_cached: bool  # whether the usage has the number of cached tokens
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _blocks: int = 0  # blocks that have begun
    _open: str = ""  # the type of the current block

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for call in answer.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": begun(call.arguments)})
        end = _end(answer.finish_reason, answer.stopped_by)
        return self._message(content) | end | {"usage": self._usage(answer.usage)}

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        """The events of a piece; before the `first` piece, the events that begin the message."""
        if first:
            usage = {"input_tokens": 0, "output_tokens": 0}  # the last event has the counts
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
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Event:
        return error_body(error)

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
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The usage; tokens that were read from the cache do not count as input."""
        cached = usage.cached_tokens if self.tells_cached else 0
        return {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }


def _end(reason: str, stopped_by: str | None) -> dict[str, Any]:
    stop = "stop_sequence" if stopped_by is not None else _STOP_REASONS[reason]
    return {"stop_reason": stop, "stop_sequence": stopped_by}


# A string, a sign, or a number or a word.
_PART = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\]:,]|[-+.\w]+)')
_SCALAR = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|true|false|null")


def begun(text: str) -> dict[str, Any]:
    """The JSON object that `text` begins, with only the members and values that are complete: Anthropic's clients read
    a call that is cut off in a stream in this way."""
    at = end = 0
    closers = rest = ""  # brackets that close what is open, at `at` and at `end`
    sign = ""  # the last part, if it is : or ,
    while found := _PART.match(text, at):
        part, at = found[1], found.end()
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
    object: dict[str, Any] = json.loads(text[:end] + rest)
    return object
