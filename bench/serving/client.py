"""A request to a server's HTTP API, and the streamed answer as its client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Answer:
    """The answer to a request. Times are seconds since the start of the measurement."""

    planned: float
    sent: float
    pieces: list[float] = field(default_factory=list)  # times of text, one per token except within characters
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: dict[str, int] = field(default_factory=dict)  # tier → its share of `cached_tokens`
    completion_tokens: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float:
        """Seconds from the request to the first text, or to the end of an answer without text."""
        return (self.pieces[0] if self.pieces else self.ended) - self.sent


async def ask(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any], begun: float, planned: float | None = None
) -> Answer:
    """The streamed answer to a request to `path`, with its error if there is one.

    body: without the fields that ask for a stream. begun: the start of the measurement by `time.perf_counter`. planned:
    when the request should have been sent; None for now.
    """
    sent = time.perf_counter() - begun
    answer = Answer(sent if planned is None else planned, sent)
    try:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", path, json=streamed) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {_code(await response.aread())}"
            else:
                await _read(response, answer, begun)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        answer.error = kind(error)
    answer.ended = time.perf_counter() - begun
    return answer


async def _read(response: httpx.Response, answer: Answer, begun: float) -> None:
    answer.error = "cut off"
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.error = None
        elif data and not data.startswith(":"):  # a comment is a sign of life
            _take(json.loads(data), answer, time.perf_counter() - begun)
        if data.startswith('{"error"'):
            answer.error = _code(data)
            return


def _take(event: dict[str, Any], answer: Answer, now: float) -> None:
    choices = event.get("choices", ())
    if text := "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices):
        answer.pieces.append(now)
        answer.text += text
    if usage := event.get("usage"):
        details = usage["prompt_tokens_details"]
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = details["cached_tokens"]
        answer.cached_from = details.get("cached_from") or {"store": answer.cached_tokens}


def _code(body: str | bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "no error of the API"


def kind(error: Exception) -> str:
    """The name of an error for a table: a status code or a Python class."""
    return str(error.response.status_code) if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
