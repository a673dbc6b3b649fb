"""Servers that a measurement starts, requests to their HTTP API, and the streamed answers as clients see them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from polarlm.engine import EngineError
from polarlm.server.config import KEY_VARIABLE

SERVE = (sys.executable, "-m", "polarlm", "serve")  # the program of our server
_LOOK_EVERY = 0.1  # seconds, at a server that starts
_PATIENCE = 600.0  # seconds to wait for data


@contextmanager
def running_server(program: Sequence[str]) -> Iterator[str]:
    """A context with the URL of a server, which takes --port and gets no key, once it is ready. Raises EngineError."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, words = f"http://127.0.0.1:{port}", [*program, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            process = subprocess.Popen(words, stdout=said, stderr=said, env=environment)
        except OSError as error:
            raise EngineError(f"{program[0]} cannot be started: {error.strerror}") from None
        with process, connect(url) as http:
            try:
                while process.poll() is None:
                    with suppress(httpx.TransportError):
                        if http.get("/health").is_success:
                            break
                    time.sleep(_LOOK_EVERY)
                else:
                    said.seek(0)
                    *_, last = "it says nothing", *filter(None, map(str.strip, said.read().splitlines()))
                    raise EngineError(f"The server did not start: {last.removeprefix('error: ')}")
                yield url
            finally:
                process.terminate()


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
    completion_tokens: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float:
        """Seconds from the request to the first text, or to the end of an answer without text."""
        return (self.pieces[0] if self.pieces else self.ended) - self.sent


def connect(url: str, headers: Mapping[str, str] | None = None, **more: Any) -> httpx.Client:
    """A client with as many connections as it needs."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.Client(base_url=url, headers=headers, timeout=_PATIENCE, limits=limits, **more)


def ask(http: httpx.Client, path: str, body: Mapping[str, Any], begun: float, planned: float | None = None) -> Answer:
    """The streamed answer to a request to `path`, with its error if there is one.

    body: without the fields that ask for a stream. begun: the start of the measurement by `time.perf_counter`. planned:
    when the request should have been sent; None for now.
    """
    sent = time.perf_counter() - begun
    answer = Answer(sent if planned is None else planned, sent)
    try:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", path, json=streamed) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {_code(response.read())}"
            else:
                _read(response, answer, begun)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        answer.error = type(error).__name__
    answer.ended = time.perf_counter() - begun
    return answer


def _read(response: httpx.Response, answer: Answer, begun: float) -> None:
    answer.error = "cut off"
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.error = None
        elif data.startswith('{"error"'):
            answer.error = _code(data)
            return
        elif data and not data.startswith(":"):  # a comment is a sign of life
            _take(json.loads(data), answer, time.perf_counter() - begun)


def _take(event: dict[str, Any], answer: Answer, now: float) -> None:
    choices = event.get("choices", ())
    if text := "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices):
        answer.pieces.append(now)
        answer.text += text
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def _code(body: str | bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "no error of the API"


def send(
    starts: Sequence[float], clients: int, request: Callable[[int, float], Answer], take: Callable[[Answer], object]
) -> None:
    """Send requests by the first free of some clients, each a thread; `take` gets each answer as it comes.

    starts: seconds from the beginning. request: the answer to a number, and the beginning by `time.perf_counter`.
    """
    begun, pool = time.perf_counter(), ThreadPoolExecutor(clients)
    numbers = {pool.submit(_start_at, begun + start, request, number, begun) for number, start in enumerate(starts)}
    try:
        for done in as_completed(numbers):
            take(done.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_at(start: float, request: Callable[[int, float], Answer], number: int, begun: float) -> Answer:
    time.sleep(max(0.0, start - time.perf_counter()))
    return request(number, begun)
