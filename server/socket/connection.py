"""The socket: lines of JSON over TCP or a Unix socket, as docs/socket-protocol.md describes them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

from polarlm.children import Lines
from polarlm.engine import Chunk, EngineError, TokenLogprob
from polarlm.engine.cli.flags import in_flags
from polarlm.model_loaders.tokenizers import Tokenizer
from polarlm.server.reading.fields import FIELDS, unknown_fields
from polarlm.server.reading.parameters import ParsedRequest, read
from polarlm.server.reading.prompts import read_prompt, read_salt
from polarlm.server.reading.values import BadRequest, read_json
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver
from polarlm.server.running.listening import BACKLOG, notice_lost_peers
from polarlm.server.running.refusals import TOO_MANY_CONNECTIONS, Refusal, busy
from polarlm.server.running.sessions import read_name, read_options_to_save

SLOW_SECONDS = 10.0  # how long a client may leave more unread than the system and the transport buffer
MOST_PENDING = 1 << 20  # bytes, and one more message, that are kept for a client that does not read them
KEY_SECONDS = 10.0  # time for a client to send the key
IDLE_SECONDS = 1800.0  # how long a client may have no request
PROBE_SECONDS = 0.25
LAST_SECONDS = 5.0  # time for clients to read their last messages

_LOG = logging.getLogger(__name__)
_MOST_ID = 200  # characters
_KNOWN_FIELDS = (*FIELDS, "id", "api_key", "cancel", "save", "load")
Id = str | int
Work = Callable[[], Awaitable[dict[str, Any]]]


class Connection(asyncio.Protocol):
    """Reads requests, and runs each as a task that writes its answer's lines.

    The connection closes, and its requests are cancelled, when the client is gone or does not read its answers. A
    client that has closed only its sending side still gets its answers. The server cannot tell the two apart, so it
    sends white space, which JSON ignores, until the answers are complete: writing fails once the client is gone.
    """

    def __init__(self, driver: Driver, connections: set[Connection]) -> None:
        self._driver = driver
        self._config = driver.config
        self._connections = connections
        self._lines = Lines(self._config.max_body)
        self._requests: dict[Id, asyncio.Task[None]] = {}
        self._key: Any = None  # what the first message had as its key
        self._key_name = None if self._config.keys.are_required else ""  # None: not valid
        self._has_greeted = False  # whether a JSON object has arrived
        self._is_half_closed = False  # whether the client has closed its sending side
        self._is_full = False  # whether the transport's buffer is full
        self._pending = bytearray()  # data to write when it has room
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.lost_event = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._loop = transport, asyncio.get_running_loop()
        name = transport.get_extra_info("peername")
        self._client = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix"
        notice_lost_peers(transport.get_extra_info("socket"))
        if len(self._connections) >= self._config.max_connections:
            self._send(None, error_of(busy(TOO_MANY_CONNECTIONS, 1)))
            self._close()
        self._connections.add(self)
        self._await_request()
        if self._key_name is None:
            self._set_timer("key", KEY_SECONDS, self._refuse_key)

    def data_received(self, data: bytes) -> None:
        for line in self._lines.feed(data):
            if self._transport.is_closing():
                return
            self._take(line)

    def eof_received(self) -> bool:
        self._is_half_closed = True
        if not self._transport.is_closing():
            self._take(self._lines.rest())
        if self._requests:
            self._probe()
        return bool(self._requests)

    def pause_writing(self) -> None:
        self._is_full = True
        self._set_timer("slow", SLOW_SECONDS, self._transport.abort)

    def resume_writing(self) -> None:
        self._is_full = False
        self._timers.pop("slow").cancel()
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        for timer in self._timers.values():
            timer.cancel()
        for task in self._requests.values():
            task.cancel()
        self.lost_event.set()

    def _take(self, line: bytes | None) -> None:
        """Start or cancel the request on a line; None for a line that is too long."""
        if line is not None and not line.strip():
            return
        request_id: Id | None = None
        try:
            message = self._read(line)
            has_key = self._greet(message)
            if self._key_name is None or (has_key and len(message) == 1):
                return
            request_id = read_id(message)
            if message.get("cancel"):
                self._cancel(request_id, message["cancel"])
            else:
                self._start(request_id, message)
        except (BadRequest, Refusal) as error:
            if self._has_greeted:
                self._send(request_id, error_of(error))
            elif self._key_name is None:
                self._refuse_key()
            else:
                self._hang_up(f"{error}; this is no port for HTTP or TLS, and the first line has to be a message")

    def _read(self, line: bytes | None) -> dict[str, Any]:
        """The message on a line. Raises BadRequest.

        A first line that is not a message closes the connection: a web page can make a browser send lines of the page's
        choice after lines of the browser's own, in the body of an HTTP request or in a TLS handshake.
        """
        if line is None:
            raise BadRequest(None, f"a line may have {self._config.max_body} bytes at most")
        message = read_json(line)
        self._has_greeted = True
        return message

    def _greet(self, message: dict[str, Any]) -> bool:
        """Check the first message's key, again with each message: it may be withdrawn. Return whether the message has
        one. A key that is not valid closes the connection."""
        key, keys = message.get("api_key"), self._config.keys
        if keys.are_required:
            self._key = key if self._key is None else self._key
            self._key_name = keys.name_of(self._key) if isinstance(self._key, str) else None
            if self._key_name is None:
                self._refuse_key()
            elif timer := self._timers.pop("key", None):
                timer.cancel()
        return key is not None

    def _refuse_key(self) -> None:
        self._hang_up('send {"api_key": …} with the right key as the first message', "unauthorized")

    def _hang_up(self, reason: str, code: str = "invalid_request") -> None:
        self._send(None, error_of(Refusal(code, reason)))
        self._close()

    def _start(self, request_id: Id, message: dict[str, Any]) -> None:
        if request_id in self._requests:
            raise BadRequest("id", "id names a request that is under way: choose another")
        work = self._work(request_id, message)
        if idle := self._timers.pop("idle", None):
            idle.cancel()
        self._requests[request_id] = self._loop.create_task(self._serve(request_id, work, message))

    def _work(self, request_id: Id, message: dict[str, Any]) -> Work:
        """The coroutine function of a message's request, which returns the last message to the client."""
        if message.get("save") and message.get("load"):
            raise BadRequest("load", "give either save or load, not both")
        if message.get("save"):
            name = read_name("save", message["save"])
            prompt = read_prompt(message, reads_images=self._driver.engine.reads_images)
            options = read_options_to_save(message, self._driver.info_for(message))
            return lambda: self._transfer(self._driver.save_session(name, prompt, options))
        if message.get("load"):
            name = read_name("load", message["load"])
            salt = read_salt(message.get("cache_salt"))
            return lambda: self._transfer(self._driver.load_session(name, salt))
        body = {"stream": True} | {name: value for name, value in message.items() if value is not None}
        request = read(body, self._driver.info_for(body))
        if request.tools is not None:
            raise BadRequest("tools", "tools are taken over HTTP alone: this socket sends answers as text")
        if request.n != 1:
            raise BadRequest("n", "n must be 1 here: send a request for each answer")
        warnings = [*request.sentences, *unknown_fields(body, _KNOWN_FIELDS)]
        return lambda: self._answer(request_id, request, warnings)

    def _cancel(self, request_id: Id, value: Any) -> None:
        """Cancel a request, unless it has ended and sent its last message already."""
        if value is not True:
            raise BadRequest("cancel", "cancel must be true")
        if request_id in self._requests:
            self._requests[request_id].cancel()
            self._finish(request_id, {"done": True, "finish_reason": "cancelled"})

    async def _serve(self, request_id: Id, work: Work, message: dict[str, Any]) -> None:
        """Run a request and send its last message; its task is cancelled with the request or the connection."""
        try:
            with journal.entry(self._client, "socket") as entry:
                entry.key = self._key_name or None
                journal.read_tier_and_slot(message)
                last = await work()
            self._finish(request_id, last)
        except (Refusal, EngineError) as error:
            self._finish(request_id, error_of(error))
        except Exception as error:
            _LOG.exception("a request of the socket ended with an unexpected error")
            self._finish(request_id, error_of(Refusal("internal", f"unexpected {type(error).__name__}")))

    async def _answer(self, request_id: Id, request: ParsedRequest, warnings: list[str]) -> dict[str, Any]:
        """warnings: sentences about what is not done as asked."""
        if entry := journal.current():
            entry.warnings = warnings
        async with aclosing(self._driver.stream(request.prompt, request.params, request.options)) as chunks:
            warnings += (await anext(chunks)).warnings
            text = ""
            logprobs: list[dict[str, Any]] = []
            tokenizer = self._driver.engine.model.tokenizer
            async for chunk in chunks:
                text += chunk.text
                logprobs += [likelihood(tokenizer, token) for token in chunk.logprobs]
                if (text or logprobs) and (request.stream or chunk.finish_reason):
                    self._send(request_id, {"delta": text} | ({"logprobs": logprobs} if logprobs else {}))
                    text, logprobs = "", []
        return last_of(chunk, self._config.hide_cached_tokens) | ({"warnings": warnings} if warnings else {})

    async def _transfer(self, session: Awaitable[int]) -> dict[str, Any]:
        tokens = await session
        return {"done": True} | ({} if self._config.hide_cached_tokens else {"tokens": tokens})

    def _finish(self, request_id: Id, message: dict[str, Any]) -> None:
        """Send the last message of a request; its id is free from then on."""
        self._send(request_id, message)
        del self._requests[request_id]
        if not self._requests:
            if self._is_half_closed:
                self._close()
            else:
                self._await_request()

    def _await_request(self) -> None:
        reason = f"there was no request under way for {IDLE_SECONDS:.0f} seconds"
        self._set_timer("idle", IDLE_SECONDS, partial(self._hang_up, reason, "timeout"))

    def _send(self, request_id: Id | None, message: dict[str, Any]) -> None:
        line = json.dumps({"id": request_id, **message}, ensure_ascii=False)
        self._write(line.encode("utf-8", "replace") + b"\n")

    def _write(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        if not self._is_full:
            self._transport.write(data)
        elif len(self._pending) > MOST_PENDING:
            self._transport.abort()
        else:  # not written to the transport, whose cost per write grows with the number of waiting writes
            self._pending += data

    def _flush(self) -> None:
        pending, self._pending = self._pending, bytearray()
        if pending:
            self._transport.write(pending)

    def _close(self) -> None:
        self._flush()
        self._transport.close()

    def _probe(self) -> None:
        """Send white space to detect a dead peer."""
        self._write(b" ")
        self._set_timer("probe", PROBE_SECONDS, self._probe)

    def _set_timer(self, name: str, seconds: float, action: Any) -> None:
        self._timers[name] = self._loop.call_later(seconds, action)

    async def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the last messages of requests, then close; return once the connection is lost."""
        try:
            if self._requests:
                await asyncio.wait(self._requests.values(), timeout=seconds)
            self._close()
            await asyncio.wait_for(self.lost_event.wait(), seconds)
        except asyncio.TimeoutError:
            self._transport.abort()
            await self.lost_event.wait()


class SocketServer:
    """Serves the clients of one listening socket; see `server.running.listening`."""

    def __init__(self, driver: Driver, listener: socket.socket) -> None:
        self._driver = driver
        self._listener = listener
        self._connections: set[Connection] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        unix = self._listener.family == getattr(socket, "AF_UNIX", None)
        create = loop.create_unix_server if unix else loop.create_server
        self._server = await create(
            lambda: Connection(self._driver, self._connections), sock=self._listener, backlog=BACKLOG
        )

    async def close(self) -> None:
        self._server.close()
        await asyncio.gather(*(connection.close(LAST_SECONDS) for connection in list(self._connections)))


def read_id(message: dict[str, Any]) -> Id:
    value = message.get("id")
    if isinstance(value, str) and len(value) <= _MOST_ID and value.isprintable():
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    raise BadRequest("id", f"id must be a whole number or a string of at most {_MOST_ID} printable characters")


def likelihood(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"id": token_id, "token": data.decode("utf-8", "replace"), "logprob": logprob}

    return entry(token.id, token.logprob) | {"top": [entry(*other) for other in token.top]}


def last_of(chunk: Chunk, hide_cached: bool) -> dict[str, Any]:
    usage = chunk.usage
    assert usage is not None
    counts: dict[str, Any] = {name: value for name, value in asdict(usage).items() if name.endswith("_tokens")}
    del counts["reasoning_tokens"]  # answers are not parsed here
    if hide_cached:
        del counts["cached_tokens"]
    else:
        counts |= {"cached_from": usage.cached_from} if usage.from_tiers else {}
        counts |= {"reread": usage.reread._asdict()} if usage.reread else {}
    if not usage.drafted_tokens:
        del counts["drafted_tokens"], counts["accepted_tokens"]
    seconds = {name: round(value, 6) for name, value in asdict(usage).items() if name.endswith("_seconds")}
    return {"done": True, "finish_reason": chunk.finish_reason, "usage": counts, "timings": seconds}


def error_of(error: Exception) -> dict[str, Any]:
    message = in_flags(error) if isinstance(error, EngineError) else str(error)
    fields: dict[str, Any] = {"code": getattr(error, "code", "invalid_request"), "message": message}
    for name in ("field", "retry_after"):
        if (value := getattr(error, name, None)) is not None:
            fields[name] = value
    return {"error": fields | getattr(error, "numbers", {})}
