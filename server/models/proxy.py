"""Passes a request on to the process of the model that it names, and the answer back, piece by piece."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from polarlm.server.config import ServerConfig
from polarlm.server.http.bodies import LARGER, read_bytes, too_large
from polarlm.server.http.errors import ApiError, ErrorShapes, api_error
from polarlm.server.http.model_details import answer_line
from polarlm.server.http.streams import DATA, HEADERS, LINES, NAMED, send_with_timeout, while_connected
from polarlm.server.models.child import CLIENT, KEY_NAME, PRIORITY
from polarlm.server.models.process import READY, ModelProcess, ModelSlot
from polarlm.server.models.supervisor import Supervisor
from polarlm.server.reading.values import BadRequest, is_empty, is_number, read_json, text, wrong_value
from polarlm.server.running import journal
from polarlm.server.running.refusals import Refusal, for_clients, model_ended

# Paths that monitors poll: a request to them loads no model, and does not count as its use.
MONITOR_PATHS = ("/stats", "/metrics", "/slots")

SILENT_SECONDS = 2.0  # for which a stream may wait for its model before the first sign of life
SIGN_SECONDS = 5.0  # between two such signs
METRICS_SECONDS = 5.0  # for a model to give its metrics, between two units of work; Prometheus waits for 10

_RESPONSES = ("/v1/responses", "/responses")
_HOP_HEADERS = {b"date", b"connection", b"keep-alive", b"transfer-encoding"}  # headers of answers, for one connection
_NO_LIMIT = httpx.Timeout(10.0, read=None)  # the process has the limits
_CRASH_SECONDS = 5.0  # from the end of a process's connections to its own

_OLLAMA_PATHS = ("/api/chat", "/api/generate")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_LONGEST = 100 * 365 * 86400.0  # seconds; beyond it there is no date
_MOST_CHARACTERS = 100  # most characters of a duration; the time of the expression grows with their cube
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(ms|us|µs|ns|h|m|s)")


class Proxy:
    def __init__(self, supervisor: Supervisor, config: ServerConfig, errors: ErrorShapes) -> None:
        self._supervisor, self._config, self._errors = supervisor, config, errors
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=20)
        # Without the proxies of the environment: the processes are on this machine.
        self._client = httpx.AsyncClient(timeout=_NO_LIMIT, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def metrics(self) -> dict[str, str | None]:
        """/metrics of each loaded model, by its name; None of one that does not answer in time."""
        slots = (one for one in self._supervisor.known() if one.state == READY)
        processes = {one.model.name: one.process for one in slots if one.process is not None}
        pages = await asyncio.gather(*map(self._metrics_of, processes.values()))
        return dict(zip(processes, pages, strict=True))

    async def _metrics_of(self, process: ModelProcess) -> str | None:
        try:
            url, headers = f"http://127.0.0.1:{process.port}/metrics", {"authorization": f"Bearer {process.key}"}
            answer = await self._client.get(url, headers=headers, timeout=METRICS_SECONDS)
            return answer.raise_for_status().text
        except httpx.HTTPError:
            return None

    async def serve(self, request: Request) -> Response:
        path, data, fields = request.url.path, b"", dict[str, Any]()
        if request.method == "POST":
            data = bytes(await read_bytes(request, LARGER * self._config.max_body))  # a model may read images
            fields = read_json(data)
        name = fields.get("model") or request.query_params.get("model") or ""
        slot = self._supervisor.find(text("model", name))
        if path == "/stats" and slot.state != READY:
            return JSONResponse({"model": slot.model.name, "state": slot.progress()})
        if path in MONITOR_PATHS and slot.state != READY:
            raise Refusal("model_not_loaded", f"{slot.model.name} is {slot.state}: it is loaded by a request")
        keep_seconds = self._supervisor.default_keep(slot)
        if path.startswith("/api/") and not is_empty(fields.get("keep_alive")):
            keep_seconds = keep_alive(fields["keep_alive"])
            has_prompt = any(fields.get(name) for name in ("messages", "prompt", "suffix", "images"))
            if keep_seconds == 0 and path in _OLLAMA_PATHS and not has_prompt:
                if not slot.model.pinned:
                    self._supervisor.give_up(slot)
                end_fields = {"done": True, "done_reason": "unload"}
                return JSONResponse(answer_line(path, slot.model.name, {"content": ""}) | end_fields)
        streams = path in _OLLAMA_PATHS if fields.get("stream") is None else fields["stream"] is True
        if data and (entry := journal.current()):
            self._supervisor.quotas.begin(entry.key)
        return _ProxiedResponse(self, request, slot, data, keep_seconds, streams=streams)


class _ProxiedResponse(Response):
    """The answer of a model's process, for which the model is loaded first. A stream that waits shows life, by comments
    or pieces without text; after these, an error is its last event."""

    def __init__(
        self, proxy: Proxy, request: Request, slot: ModelSlot, body: bytes, keep_seconds: float | None, *, streams: bool
    ) -> None:
        """keep_seconds: for which the model is kept afterwards. streams: whether the answer is a stream."""
        self._proxy, self._request, self._slot = proxy, request, slot
        self._path, self._body, self._keep_seconds, self._streams = request.url.path, body, keep_seconds, streams
        event_framing = NAMED if self._path.startswith(("/v1/messages", *_RESPONSES)) else DATA
        self._framing = LINES if self._path.startswith("/api/") else event_framing
        self._began = False  # whether the client has the status and the headers
        self._type = b""  # the Content-Type that they have

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self._answer(send))
        except Exception as error:  # EngineError, Refusal: as the API writes errors
            client_error = error if isinstance(error, ApiError) else api_error(for_clients(error))
            if not self._began:
                await self._proxy._errors.response(self._path, client_error)(scope, receive, send)
            elif self._type.startswith((b"text/event-stream", b"application/x-ndjson")):
                event = self._proxy._errors.body(self._path, client_error)
                await self._send_error(send, event)
            # Otherwise the connection is closed, since the body has not all of its announced bytes.

    async def _answer(self, send: Send) -> None:
        await self._load(send)
        slot = self._slot
        with self._proxy._supervisor.use(slot, self._keep_seconds) as process:
            most = self._proxy._config.max_body
            if len(self._body) > most and not process.reads_images:
                raise too_large(most)
            entry = journal.current()
            try:
                if entry:
                    entry.silent = True  # the process writes the line
                await self._pass_on(process, send)
            except httpx.HTTPError as error:
                if entry:
                    entry.silent, entry.outcome = False, "model_ended"
                with suppress(asyncio.TimeoutError):
                    code = await asyncio.wait_for(process.exit_code(), _CRASH_SECONDS)
                    raise model_ended(slot.model.name, code) from None
                raise Refusal("model_ended", f"The connection to {slot.model.name} was lost: {error}") from None

    async def _load(self, send: Send) -> None:
        """Wait for the model, with signs of life on a stream. Raises EngineError or Refusal."""
        start, limit = time.monotonic(), self._proxy._config.request_seconds
        loading = asyncio.ensure_future(self._proxy._supervisor.acquire(self._slot))
        try:
            while not loading.done():
                await asyncio.wait([loading], timeout=SIGN_SECONDS if self._began else SILENT_SECONDS)
                if not loading.done() and time.monotonic() - start > limit:
                    raise Refusal("timeout", f"{self._slot.model.name} was not loaded within {limit} seconds")
                if not loading.done() and self._streams:
                    await self._show_life(send, time.monotonic() - start)
            loading.result()
        except BaseException:
            if not loading.cancel() and not loading.cancelled() and loading.exception() is None:
                self._proxy._supervisor.release(self._slot)
            raise

    async def _show_life(self, send: Send, seconds: float) -> None:
        name, path = self._slot.model.name, self._path
        if not self._began:
            response = Response(headers=HEADERS, media_type=self._framing.media_type)
            del response.headers["content-length"]
            await self._begin(send, 200, response.raw_headers)
        if self._framing is LINES:
            await send_with_timeout(send, LINES.frame(answer_line(path, name, {"content": ""}) | {"done": False}))
        else:
            plain = name.encode("ascii", "replace").decode()
            await send_with_timeout(send, f": {plain}: {self._slot.progress()}, {seconds:.0f} s\n\n".encode())

    async def _pass_on(self, process: ModelProcess, send: Send) -> None:
        request, client = self._request, self._request.client
        headers = {
            "authorization": f"Bearer {process.key}",
            "accept-encoding": "identity",
            CLIENT: "unknown:0" if client is None else f"{client.host}:{client.port}",
        }
        if entry := journal.current():
            headers |= entry.trace_headers
        if entry and entry.key:
            headers[KEY_NAME] = entry.key
            if (priority := self._proxy._config.keys.limits_of(entry.key).get("priority")) is not None:
                headers[PRIORITY] = str(priority)
        if request.method == "POST":
            headers["content-type"] = "application/json"  # which some of Ollama's clients leave out
        url = f"http://127.0.0.1:{process.port}{request.scope['raw_path'].decode('ascii')}"
        if query := request.url.query:
            url += f"?{query}"
        async with self._proxy._client.stream(request.method, url, headers=headers, content=self._body) as answer:
            if self._began and answer.status_code != 200:  # too late for the status
                await self._send_error(send, json.loads(await answer.aread()))
                return
            if not self._began:
                fields = ((name.lower(), value) for name, value in answer.headers.raw)
                await self._begin(send, answer.status_code, [field for field in fields if field[0] not in _HOP_HEADERS])
            async for piece in answer.aiter_raw():
                await send_with_timeout(send, piece)
        await send_with_timeout(send, b"", last=True)

    async def _begin(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._began, self._type = True, dict(headers).get(b"content-type", b"")
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_error(self, send: Send, body: dict[str, Any]) -> None:
        error = body.get("error")
        if self._path.startswith(_RESPONSES) and isinstance(error, dict):
            members = {name: error.get(name) for name in ("code", "message", "param")}
            body = {"type": "error", **members, "sequence_number": 0}
        with suppress(ClientDisconnect):
            await send_with_timeout(send, self._framing.frame(body), last=True)


def keep_alive(value: Any) -> float | None:
    """Seconds that Ollama's field says, as a number or as "1h30m"; None, for a negative one or a century: without end.
    Raises BadRequest.

    >>> keep_alive("1h30m"), keep_alive(90), keep_alive("0"), keep_alive(-1), keep_alive(10**400)
    (5400.0, 90.0, 0.0, None, None)
    """
    if is_number(value) and value == value:  # which NaN is not
        return float(value) if 0 <= value < _LONGEST else None
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        raise wrong_value("keep_alive", 'seconds, or a text such as "10m"', value)
    number = value.lstrip("+-")
    parts = _DURATION.findall(number)
    if re.fullmatch(r"\d+\.?\d*", number):
        seconds = float(number)
    elif parts and "".join(map("".join, parts)) == number:
        seconds = sum(float(count) * _UNITS[unit] for count, unit in parts)
    else:
        raise BadRequest("keep_alive", 'keep_alive must be seconds, or a text such as "10m" or "1h30m"')
    return None if value.startswith("-") or seconds >= _LONGEST else seconds
