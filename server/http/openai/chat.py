"""OpenAI's endpoint for conversations: /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from polarlm.engine.parsing.pieces import Answer, Piece
from polarlm.server.http.generation import Endpoint, ModelInfo
from polarlm.server.http.openai.logprobs import ChatLogprobs
from polarlm.server.http.openai.shapes import ChoicesWriter
from polarlm.server.reading.parameters import ParsedRequest, read


class ChatCompletions(Endpoint):
    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, ChatWriter]:
        request = read(body, info, ("messages",), switched_logprobs=True)
        logprobs = [
            ChatLogprobs(info.model.tokenizer) for _ in range(0 if request.params.logprobs is None else request.n)
        ]
        return replace(request, has_custom_calls=True), ChatWriter(
            info.name, request.include_usage, logprobs, info.tells_cached, request.n, info.fingerprint
        )


class ChatWriter(ChoicesWriter):
    prefix, kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening: ClassVar[dict[str, Any] | None] = {"delta": {"role": "assistant", "content": ""}}

    def fields(self, answer: Answer) -> dict[str, Any]:
        calls = [call.to_json() for call in answer.calls]
        content = None if calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def piece_fields(self, piece: Piece, number: int) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text:
            delta["content"] = piece.text
        kind, name = ("custom", "input") if piece.is_custom else ("function", "arguments")
        if piece.call is not None:
            members = {"name": piece.call.name, name: piece.arguments}
            delta["tool_calls"] = [{"index": number, "id": piece.call.id, "type": kind, kind: members}]
        elif piece.arguments:
            delta["tool_calls"] = [{"index": number, kind: {name: piece.arguments}}]
        return {"delta": delta}
