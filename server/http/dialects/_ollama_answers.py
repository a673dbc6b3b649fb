"""The writer of Ollama's API: a JSON object for each piece, or one for the whole answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from polarlm.server.answers.pieces import Answer, Call, Piece
from polarlm.server.http.dialects._shared import arguments_of
from polarlm.server.http.errors import ApiError
from polarlm.server.http.generation import Writer
from polarlm.server.http.openai.logprobs import ChatLogprobs
from polarlm.server.http.streams import Event


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.told("ollama")}


@dataclass
class LinesWriter(Writer):
    model: str
    content: Callable[[dict[str, Any]], dict[str, Any]]
    logprobs: ChatLogprobs | None
    _since: float = field(default_factory=time.monotonic)
    _call: Call | None = None  # the current call, which is written when it is complete
    _calls: int = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content: dict[str, Any] = {"content": answer.text}
        if answer.reasoning:
            content["thinking"] = answer.reasoning
        if calls := [written for call in answer.calls for written in self._written(call)]:
            content["tool_calls"] = calls
        piece = Piece(logprobs=answer.logprobs, finish_reason=answer.finish_reason, usage=answer.usage)
        return self._object(content, piece) | self._end(piece)

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        """The lines of a piece; one without text for a piece that is still waited for."""
        content: dict[str, Any] = {"content": piece.text}
        if piece.reasoning:
            content["thinking"] = piece.reasoning
        calls: list[dict[str, Any]] = []
        if piece.call is not None:
            calls += self._written(self._call)
            self._call = Call(piece.call.id, piece.call.name, "")
        if self._call is not None:
            self._call = Call(self._call.id, self._call.name, self._call.arguments + piece.arguments)
        if piece.finish_reason is not None:
            calls += self._written(self._call)
        if calls:
            content["tool_calls"] = calls
        if piece.text or piece.reasoning or calls or piece.logprobs or piece.is_waiting:
            yield self._object(content, piece) | {"done": False}
        if piece.finish_reason is not None:
            yield self._object({"content": ""}, Piece()) | self._end(piece)

    def failure(self, error: ApiError) -> Event:
        return error_body(error)

    def _written(self, call: Call | None) -> list[dict[str, Any]]:
        """A list with a whole call; empty for one that was cut off."""
        if call is None or (arguments := arguments_of(call.arguments)) is None:
            return []
        self._calls += 1
        function = {"index": self._calls - 1, "name": call.name, "arguments": arguments}
        return [{"id": call.id, "function": function}]

    def _object(self, content: dict[str, Any], piece: Piece) -> dict[str, Any]:
        written = head(self.model) | self.content(content)
        if self.logprobs is not None and piece.logprobs:
            written["logprobs"] = self.logprobs.write(piece.logprobs)["content"]
        return written

    def _end(self, piece: Piece) -> dict[str, Any]:
        """The fields at the end of an answer. Durations are in nanoseconds."""
        usage = piece.usage
        assert usage is not None
        return {
            "done": True,
            "done_reason": "length" if piece.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(time.monotonic() - self._since),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(usage.prefill_seconds),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(usage.generation_seconds),
        }


def head(model: str) -> dict[str, Any]:
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


def nanoseconds(seconds: float) -> int:
    """`seconds` in whole nanoseconds, the unit of this API."""
    return round(seconds * 1e9)
