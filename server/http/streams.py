"""Streams: several answers at once, clients that disconnect, and responses that are sent event by event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from polarlm.engine import EngineError
from polarlm.engine.parsing.pieces import Piece
from polarlm.server.http.errors import ApiError, api_error
from polarlm.server.running.refusals import Refusal

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, Piece], None]
"""(number of the answer, piece) for the pieces of several answers."""

Event = dict[str, Any] | None
"""A JSON object; None for the mark at the end of OpenAI's streams."""

COMMENT = b":\n\n"
"""A comment of server-sent events, which clients pass over."""

SLOW_READER_SECONDS = 10.0  # how long a client may read nothing while its buffers are full
SILENT_SECONDS = 5.0  # in which nothing is sent, before a sign of life; proxies hang up after 30 or 60


async def merge(answers: Sequence[AsyncGenerator[Piece, None]]) -> Pieces:
    """Yield the pieces of all `answers` as they arrive. The first error, or closing the generator, ends all answers."""
    if len(answers) == 1:  # without the cost of a queue and of a task that fills it
        async with aclosing(answers[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

    async def read(index: int, answer: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(answer):
                async for piece in answer:
                    queue.put_nowait((index, piece))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(index, answer)) for index, answer in enumerate(answers)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await end_tasks(tasks)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects, `work` is cancelled. Raises ClientDisconnect."""
    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait([work_task, disconnect_task], return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        return work_task.result()
    finally:
        await end_tasks([work_task, disconnect_task])


async def _wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. The body of its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and return when they have ended."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True)
class Framing:
    media_type: str
    frame: Callable[[Event], bytes]


def _json(event: Event) -> str:
    """An event as JSON in ASCII: some clients take Unicode's line separators for the end of a line."""
    return "[DONE]" if event is None else json.dumps(event, separators=(",", ":"))


_SERVER_SENT = "text/event-stream"

DATA = Framing(_SERVER_SENT, lambda event: f"data: {_json(event)}\n\n".encode("ascii"))
"""Server-sent events, and "[DONE]" for None."""

NAMED = Framing(_SERVER_SENT, lambda event: f"event: {(event or {})['type']}\ndata: {_json(event)}\n\n".encode("ascii"))
"""Server-sent events that are named by their "type"."""

LINES = Framing("application/x-ndjson", lambda event: f"{_json(event)}\n".encode("ascii"))
"""A line for each event."""


HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Of every stream. nginx, and what is built on it, would hold pieces back."""


class EventStream(Response):
    """A response that is sent event by event, with a sign of life where nothing was sent for a while.

    An error before anything was sent gets a response with its status; a later one is the last event. `events` is closed
    when the client disconnects or does not read.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        framing: Framing,
        failure: Callable[[ApiError], Event] | None = None,
        sign: Callable[[], bytes] | None = None,
    ) -> None:
        """failure: the event of an error. sign: returns a sign of life; without it there is none."""
        super().__init__(headers=HEADERS, media_type=framing.media_type)
        del self.headers["content-length"]
        self.silent_seconds = SILENT_SECONDS if sign else 0.0
        self._events, self._frame = events, framing.frame
        self._failure, self._sign = failure, sign
        self._has_begun = False  # whether the client has the status and the headers
        self._is_writing = False  # whether a piece is sent, or waits for a sign of life that is
        self._timer: asyncio.TimerHandle | None = None  # looks whether a sign of life is due
        self._sign_task: asyncio.Task[None] | None = None  # sends one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Refusal or EngineError if nothing has been sent yet."""
        async with aclosing(self._events):
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        self._send, self._loop = send, asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._watch()
        try:
            try:
                async for event in self._events:
                    await self._write(self._frame(event))
            except (Refusal, EngineError) as error:
                if not self._has_begun or self._failure is None:
                    raise
                await self._write(self._frame(self._failure(api_error(error))))
            self._stop_watching()
            await self._write(b"", last=True)
        finally:
            self._stop_watching()
            if self._sign_task is not None:
                await end_tasks([self._sign_task])

    async def _write(self, data: bytes, last: bool = False) -> None:
        """Send a piece of the body, after a sign of life that is being sent. Raises ClientDisconnect."""
        self._is_writing = True  # until the piece is sent: no other sign may begin once this one has ended
        if self._sign_task is not None:
            await self._sign_task
            self._sign_task = None
        await self._put(data, last)
        self._is_writing = False

    async def _put(self, data: bytes, last: bool = False) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_with_timeout(self._send, data, last=last)
        self._last_sent = self._loop.time()

    def _watch(self) -> None:
        if self.silent_seconds:  # a timer costs a piece less than a task that waits for the next one
            self._timer = self._loop.call_at(self._last_sent + self.silent_seconds, self._look)

    def _look(self) -> None:
        """Show life if nothing was sent for so long, unless something is being sent, or an earlier sign failed."""
        if self._loop.time() >= self._last_sent + self.silent_seconds:
            self._last_sent = self._loop.time()
            last_sign = self._sign_task
            if not self._is_writing and (last_sign is None or (last_sign.done() and last_sign.exception() is None)):
                assert self._sign is not None
                self._sign_task = asyncio.create_task(self._put(self._sign()))
        self._watch()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


async def send_with_timeout(send: Send, data: bytes, last: bool = False) -> None:
    """Send a piece of the body. Raises ClientDisconnect if the client reads nothing for too long. A timer cancels the
    current task, which must be one of `while_connected`: that saves a task for each piece."""
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(SLOW_READER_SECONDS, give_up)
    try:
        await send({"type": "http.response.body", "body": data, "more_body": not last})
    except asyncio.CancelledError:
        if is_late:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
