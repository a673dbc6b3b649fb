"""/documents/text: the text of a PDF that a user attaches to a message of the chat page."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.children import python
from polarlm.server.config import ServerConfig
from polarlm.server.http.bodies import LARGER, read_bytes
from polarlm.server.http.errors import ApiError
from polarlm.server.http.streams import while_connected
from polarlm.server.running.refusals import busy

_AT_ONCE = 2  # files that are read at a time, in each turn; others wait
_MOST = 16  # files in memory, which arrive, wait or are read; further files are refused
_MOST_LONG = 8  # of them, for which the first turn was too short
_TURNS = (3.0, 30.0)  # seconds: a usual file waits for short turns alone


class Documents:
    """The endpoint. A separate process reads each file: a malicious file may take for ever, or all memory."""

    def __init__(self, config: ServerConfig) -> None:
        self._most = config.max_body
        self._free = {seconds: asyncio.Semaphore(_AT_ONCE) for seconds in _TURNS}
        self._files = self._long = 0

    def routes(self) -> list[Route]:
        return [Route("/documents/text", self.text, methods=["POST"])]

    async def text(self, request: Request) -> Response:
        if find_spec("pypdf") is None:
            sentence = "This server reads no PDF files: its extra pdf is not installed (pip install 'polarlm[pdf]')"
            raise ApiError(501, sentence, "not_supported")
        if self._files >= _MOST:
            raise busy(f"The server has {_MOST} files to read", 2)
        self._files += 1
        try:
            data = bytes(await read_bytes(request, LARGER * self._most))
            document = json.loads(await while_connected(request.receive, self._read(data)))
        finally:
            self._files -= 1
        if "error" in document:
            raise ApiError(400, document["error"], "invalid_request")
        return JSONResponse(document)

    async def _read(self, data: bytes) -> bytes:
        """The JSON about a file, which is read again where a turn was too short. Raises ApiError or Refusal."""
        short, long = _TURNS
        async with self._free[short]:
            if (document := await _read(data, self._most, short)) is not None:
                return document
        if self._long >= _MOST_LONG:
            raise busy(f"The server has {_MOST_LONG} files to read that take long", 10)
        self._long += 1
        try:
            async with self._free[long]:
                if (document := await _read(data, self._most, long)) is not None:
                    return document
        finally:
            self._long -= 1
        raise ApiError(400, f"This PDF was not read within {long:.0f} seconds", "invalid_request")


async def _read(data: bytes, most: int, seconds: float) -> bytes | None:
    """The JSON that `polarlm.server.reading.pdf` writes about a file; None if that takes longer. Raises ApiError."""
    program = python("polarlm.server.reading.pdf", str(most))
    pipe, devnull = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=devnull)
    try:
        output, _ = await asyncio.wait_for(process.communicate(data), seconds)
    except asyncio.TimeoutError:
        return None
    finally:  # also if the client is gone
        with suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        raise ApiError(400, "This PDF cannot be read: it is damaged, or needs too much memory", "invalid_request")
    return output
