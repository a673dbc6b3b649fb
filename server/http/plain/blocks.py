"""/blocks/NAME: blocks that --cache-disk keeps, for engines on other machines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from polarlm.engine.storage.objects import DamagedObject, unpack
from polarlm.engine.storage.tiers.search import Budget
from polarlm.engine.storage.tiers.tier_store import FolderTier
from polarlm.server.http.bodies import announced_bytes, read_bytes, too_large
from polarlm.server.http.errors import CLOSE, ApiError
from polarlm.server.http.streams import send_with_timeout, while_connected
from polarlm.server.running.job import Job, Worker

_MOST_BYTES = 256 << 20  # limit for all blocks being received, and for all being sent; at least one block
_PIECE = 1 << 18  # bytes that are sent at a time
_MOST_WAITING = 64  # requests for blocks at the same time
_SECONDS = 10.0  # timeout of the disk
_TYPE = "application/octet-stream"

T = TypeVar("T")


class _Content(Response):
    """Bytes of a block in pieces, so that no buffer has more than one that the client has not read. `room` is closed at
    the end, also if the client disconnects or does not read."""

    def __init__(
        self, content: memoryview, room: ExitStack, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        more = {"Accept-Ranges": "bytes", "Content-Length": str(len(content)), **(headers or {})}
        super().__init__(None, status, more, _TYPE)
        self._content, self._room = content, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._room, suppress(ClientDisconnect):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for first in range(0, len(self._content), _PIECE):
            await send_with_timeout(send, bytes(self._content[first : first + _PIECE]))
        await send_with_timeout(send, b"", last=True)


class Blocks:
    def __init__(self, place: FolderTier, most: int) -> None:
        """most: bytes of the largest possible block."""
        self._place, self._most = place, most
        self._receiving, self._sending = (Budget(max(_MOST_BYTES, most)) for _ in range(2))
        self._worker = Worker("blocks")  # unlike a pool's thread, it lets the process end even if the disk hangs
        self._waiting_count = 0

    def routes(self) -> list[Route]:
        return [Route("/blocks/{name}", self.get, methods=["GET"]), Route("/blocks/{name}", self.put, methods=["PUT"])]

    async def get(self, request: Request) -> Response:
        """The bytes of a block; with "Range: bytes=N-", the bytes from N on, to resume an interrupted transfer."""
        name = _read_name(request)
        size = await self._do(partial(self._place.size, name))
        if size is None:
            raise _missing_error()
        if request.method == "HEAD":
            return Response(media_type=_TYPE)
        size = min(size, self._most)
        if not self._sending.take(size):
            raise _busy_error()
        with ExitStack() as room:
            room.callback(self._sending.give_back, size)
            content = await self._do(partial(self._read, name))
            if content is None:
                raise _missing_error()
            range_match = re.fullmatch(r"bytes=(\d{1,12})-(\d{0,12})", request.headers.get("range", ""))
            if range_match is None:
                return _Content(memoryview(content), room.pop_all())
            start, stop = int(range_match[1]), min(int(range_match[2] or len(content)) + 1, len(content))
            if start >= stop:
                whole = {"Content-Range": f"bytes */{len(content)}"}
                raise ApiError(416, f"The block has {len(content)} bytes", headers=whole)
            part = f"bytes {start}-{stop - 1}/{len(content)}"
            return _Content(memoryview(content)[start:stop], room.pop_all(), 206, {"Content-Range": part})

    def _read(self, name: bytes) -> memoryview | None:
        content = self._place.read(name)
        self._place.touch([name])
        return content

    async def put(self, request: Request) -> Response:
        """Keep a block, whose checksum and name must be right. Sending the same block again changes nothing."""
        name = _read_name(request)
        announced_size = announced_bytes(request)
        if announced_size is not None and announced_size > self._most:
            raise too_large(self._most)
        size = self._most if announced_size is None else announced_size
        if not self._receiving.take(size):
            raise _busy_error(CLOSE)  # closes the connection, since the body has not been read
        try:
            body = await read_bytes(request, self._most)
            await self._do(partial(self._keep, name, body))
        except DamagedObject as error:
            raise ApiError(400, f"This is not the block of that name: {error}", "damaged_block") from None
        finally:
            self._receiving.give_back(size)
        return Response(status_code=204)

    def _keep(self, name: bytes, body: bytearray) -> None:
        unpack(name, body)
        self._place.write(name, b"", memoryview(body))

    async def _do(self, work: Callable[[], T]) -> T:
        if self._waiting_count >= _MOST_WAITING:
            raise _busy_error()
        job = Job(asyncio.get_running_loop())
        self._waiting_count += 1
        try:
            self._worker.submit(partial(job.do, work))
            result: T = await asyncio.wait_for(job.next(), _SECONDS)
            return result
        except asyncio.TimeoutError:
            raise ApiError(504, "The disk takes too long", "timeout") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ApiError(507, f"The block cannot be read or written: {reason}", "storage") from None
        finally:
            self._waiting_count -= 1
            job.close()


def _read_name(request: Request) -> bytes:
    name = request.path_params["name"]
    if re.fullmatch("[0-9a-f]{32}", name) is None:
        raise ApiError(400, "A block's name has 32 hexadecimal digits", param="name")
    return bytes.fromhex(name)


def _busy_error(more: Mapping[str, str] | None = None) -> ApiError:
    headers = {"Retry-After": "1", **(more or {})}
    return ApiError(503, "Too many blocks are asked for or sent at the same time", "busy", headers=headers)


def _missing_error() -> ApiError:
    return ApiError(404, "There is no such block here", "unknown_block")
