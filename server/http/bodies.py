"""Endpoints of one model, and the bodies of requests, which are read with limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from polarlm.engine.requests.prompts import Prompt
from polarlm.server.http.errors import CLOSE, ApiError
from polarlm.server.http.streams import while_connected
from polarlm.server.reading.values import read_json
from polarlm.server.running.driver import Driver

T = TypeVar("T")
LARGER = 16  # what has images, or is a PDF, may have this many times the bytes of --max-body
_BODY_SECONDS = 30  # for all of a request's body to arrive


class Endpoints:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body of a request. Raises ApiError or BadRequest."""
        larger = LARGER if self._driver.engine.reads_images else 1
        return await read_body(request, larger * self._driver.config.max_body)

    async def _run_counted(self, request: Request, outcome: str, work: Callable[[], T], prompt: Prompt = "") -> T:
        """`Driver.run_counted`, while the client is there. Raises ClientDisconnect, Refusal or EngineError."""
        return await while_connected(request.receive, self._driver.run_counted(outcome, work, prompt))


async def read_body(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in the body of a request, of at most `limit` bytes. Raises ApiError or BadRequest."""
    return read_json(bytes(await read_bytes(request, limit)))


async def read_bytes(request: Request, limit: int) -> bytearray:
    """The body of a request, of at most `limit` bytes. Raises ApiError, or ClientDisconnect."""
    try:
        return await asyncio.wait_for(_bytes(request, limit), _BODY_SECONDS)
    except asyncio.TimeoutError:
        sentence = f"The request did not arrive within {_BODY_SECONDS} seconds"
        raise ApiError(408, sentence, "timeout", headers=CLOSE) from None


async def _bytes(request: Request, limit: int) -> bytearray:
    if (announced_bytes(request) or 0) > limit:
        raise too_large(limit)
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise too_large(limit)
    return data


def announced_bytes(request: Request) -> int | None:
    """The size of a body in bytes, by its Content-Length; None without one."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request is larger than {limit} bytes", "request_too_large", headers=CLOSE)
