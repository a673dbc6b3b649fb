"""The log: a line for each request and each warning, as JSON, or as plain sentences on a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from polarlm.server.running.listening import HEALTH_PATHS
from polarlm.server.running.tracing import RequestSpan, trace_headers

if TYPE_CHECKING:
    from polarlm.engine import Chunk
    from polarlm.engine.outputs import Reread
    from polarlm.engine.requests.prompts import Prompt
    from polarlm.server.running.recent_prompts import Comparison

REQUESTS = logging.getLogger("server.requests")
KEY = "polarlm.key"  # in an ASGI scope: the name of the key, where it was checked before
PRIORITY = "polarlm.priority"  # in an ASGI scope: the least of the key's requests
_MOST_PATH = 200  # characters of a path, which clients choose
# Paths that open pages and monitors poll. Their lines would hide all others, so they are logged only if they fail.
_MONITOR_ROUTES = {*HEALTH_PATHS, "/stats", "/conversations", "/metrics"}


def note(sentence: str) -> None:
    """Write a sentence for whoever has started the server to standard error, which the log's lines follow."""
    print(sentence, file=sys.stderr, flush=True)


@dataclass
class Entry:
    """A request's fields for its line in the log. Several answers to one request share an entry."""

    client: str
    route: str
    key: str | None = None  # the name of the key that the client has sent
    priority: int | None = None  # the least of the key's requests, where it was checked before
    in_background: bool | None = None  # True for a request that gives way to all others
    adapter: str | None = None
    status: int | None = None  # HTTP status
    outcome: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    warnings: list[str] = field(default_factory=list)  # about what of the request is not done as it asks
    prompt: Prompt | None = None  # None unless prompts are logged
    answer: str | None = None
    traceparent: str | None = None  # W3C's header
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # see `tracing`
    span: RequestSpan | None = None
    slot: int = -1  # llama-server's number of the place that the client wants it computed in; -1: any
    response: str | None = None  # the id of the response, for APIs that name an earlier one
    previous_response: str | None = None  # the id of the one that the client's prompt is to be compared with
    comparison: Comparison | None = None  # of the prompt with an earlier one
    reread: Reread | None = None  # what of the prompt was read again, and why
    silent: bool = False  # whether it gets no line: it is routine, or another process writes the line
    _start_time: float = field(default_factory=time.monotonic)

    def count(self, chunk: Chunk) -> None:
        self.completion_tokens += len(chunk.token_ids)
        if chunk.usage is not None:
            self.cached_tokens += chunk.usage.cached_tokens
        if self.prompt is not None:
            self.answer = (self.answer or "") + chunk.text

    def line(self) -> dict[str, Any]:
        hidden = (
            "silent",
            "trace_headers",
            "span",
            "response",
            "previous_response",
            "comparison",
            "reread",
            "_start_time",
        )
        fields = {name: value for name, value in vars(self).items() if name not in hidden}
        if self.reread is not None:
            words = () if self.prompt is not None else ("before", "now")  # which are of prompts
            fields["reread"] = {name: value for name, value in self.reread._asdict().items() if name not in words}
        present = {name: value for name, value in fields.items() if value is not None and value != []}
        return present | {"seconds": round(time.monotonic() - self._start_time, 6)}


_CURRENT: ContextVar[Entry | None] = ContextVar("entry", default=None)


def current() -> Entry | None:
    """The entry of this task's request; None outside of one."""
    return _CURRENT.get()


def read_tier_and_slot(body: Mapping[str, Any]) -> None:
    """Let this task's request give way to all others, if its body asks for OpenAI's slow tier; note its slot."""
    if log_entry := current():
        log_entry.in_background = log_entry.in_background or body.get("service_tier") == "flex" or None
        log_entry.slot = slot if isinstance(slot := body.get("id_slot"), int) else -1


@contextmanager
def entry(client: str, route: str) -> Iterator[Entry]:
    """Yields the entry of a request, and writes its line at the end, unless it is routine."""
    log_entry = Entry(client, route)
    token = _CURRENT.set(log_entry)
    try:
        yield log_entry
    finally:
        _CURRENT.reset(token)
        if log_entry.span is not None:
            log_entry.span.end(log_entry.prompt_tokens, log_entry.completion_tokens, log_entry.outcome)
        if not log_entry.silent:
            REQUESTS.info("request", extra={"line": log_entry.line()})


class JournalMiddleware:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = ":".join(map(str, scope.get("client") or ("unknown",)))
        with entry(client, f"{scope['method']} {scope['path']}"[:_MOST_PATH]) as log_entry:
            log_entry.key, log_entry.priority = scope.get(KEY), scope.get(PRIORITY)
            sent = scope.get("headers", ())
            log_entry.trace_headers = trace_headers(sent)
            log_entry.traceparent = log_entry.trace_headers.get("traceparent")

            async def send_and_note(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    log_entry.status = message["status"]
                    log_entry.silent |= log_entry.status == 200 and scope["path"] in _MONITOR_ROUTES
                    present = {name.lower() for name, _ in message.get("headers", ())}  # those of a model's process
                    headers = log_entry.trace_headers if log_entry.span is None else log_entry.span.headers
                    more = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                    message["headers"] = [*message.get("headers", ()), *(one for one in more if one[0] not in present)]
                await send(message)

            await self._app(scope, receive, send_and_note)


class _Json(logging.Formatter):
    def __init__(self, model: str | None) -> None:
        super().__init__()
        self._model = model

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")}
        line |= {} if self._model is None else {"model": self._model}
        line |= getattr(record, "line", None) or {"level": record.levelname, "message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, default=_bytes)


class _ForPeople(_Json):
    """`12:00:01 POST /v1/completions 200 stop: 59 of 76 prompt tokens cached, 40 new, 2.1 s, for 127.0.0.1:40000`"""

    def format(self, record: logging.LogRecord) -> str:
        line = getattr(record, "line", None)
        text = f"{record.levelname.lower()}: {record.getMessage()}" if line is None else _in_words(line)
        model = "" if self._model is None else f"{self._model}: "
        lines = [f"{datetime.fromtimestamp(record.created):%H:%M:%S} {model}{text}"]
        if record.exc_info and record.exc_info[1] is not None:
            lines += "".join(traceback.format_exception(record.exc_info[1])).splitlines()
        return "\n".join(map(_visible, lines))


def _bytes(image: bytes) -> str:
    return f"{len(image):,} bytes"


def _visible(line: str) -> str:
    """`line` with control characters replaced: a path, which clients choose, must not move the cursor or end a line."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def _in_words(line: Mapping[str, Any]) -> str:
    heads = [str(line[name]) for name in ("route", "status", "outcome") if name in line]
    facts = [f"{line['seconds']:.1f} s, for {line['client']}" + (f" ({line['key']})" if "key" in line else "")]
    if "adapter" in line:
        facts.insert(0, f"adapter {line['adapter']}")
    if line["prompt_tokens"]:
        cached_tokens, prompt_tokens = line["cached_tokens"], line["prompt_tokens"]
        facts.insert(0, f"{cached_tokens} of {prompt_tokens} prompt tokens cached, {line['completion_tokens']} new")
    if "reread" in line:
        from polarlm.engine.outputs import Reread

        facts.append(str(Reread(**line["reread"])))
    if "traceparent" in line:
        facts.append(f"trace {line['traceparent']}")
    if "warnings" in line:
        facts.append(f"warning: {'; '.join(line['warnings'])}")
    texts = [
        f"{name} {json.dumps(line[name], ensure_ascii=False, default=_bytes)}"
        for name in ("prompt", "answer")
        if name in line
    ]
    return f"{' '.join(heads)}: {', '.join([*facts, *texts])}"


def set_up(model: str | None = None) -> None:
    """Log requests, and warnings of libraries, to standard error. model: a name for each line."""
    from polarlm.engine.requests.request import WARNINGS

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ForPeople(model) if sys.stderr.isatty() else _Json(model))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    REQUESTS.setLevel(logging.INFO)
    WARNINGS.disabled = True  # the lines of requests have them
