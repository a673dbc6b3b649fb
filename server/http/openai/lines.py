"""Files of requests in the format of OpenAI's batches, a JSON object on each line, and the lines that answer them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from polarlm.engine import EngineError
from polarlm.server.http.streams import end_tasks
from polarlm.server.reading.values import BadRequest, flag, mapping, one_of, read_json, text

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_LONGEST = 64 << 20  # bytes of a line; what is longer is damaged
_PAUSE = 1.0  # seconds before a request is sent again that the server refused for a while
_HEAD = b'{"id": "batch_req_'  # of each line of an answer
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Line:
    """A request of a file. The id is a hash of the line; `error` is a sentence about one that is no request."""

    id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""  # JSON
    error: str = ""


class LineFiles:
    """A file of requests, and the files that get a line for each: a line that either has is not written again. Its
    methods block on the disk, and raise OSError."""

    def __init__(
        self,
        source: Path,
        output: Path,
        errors: Path,
        urls: Sequence[str] = ENDPOINTS,
        check_room: Callable[[int], None] = lambda size: None,
    ) -> None:
        """errors: gets what failed; may be the output. urls: the endpoints that lines may name. check_room: called with
        the bytes of each line before it is written."""
        self._source, self.output, self.errors = source, output, errors
        self._urls, self._check_room = urls, check_room
        self.counts = {"total": 0, "completed": 0, "failed": 0}
        self._answered: set[str] = set()

    def open(self) -> None:
        """Count the requests, and those that have an answer. An answer that was being written when its process ended is
        cut off. Raises EngineError if a file of answers has other lines."""
        self.counts["total"] = sum(1 for _ in _lines_of(self._source))
        for path in filter(Path.exists, {self.output, self.errors}):
            with path.open("r+b") as file:
                end = 0
                for data in file:
                    if data[: len(_HEAD)] != _HEAD[: len(data)]:
                        raise EngineError(f"{path.name} has lines that answer no batch: name another file")
                    if not data.endswith(b"\n"):
                        file.truncate(end)
                        break
                    end += len(data)
                    answer = json.loads(data)
                    self._count(answer["id"], (answer["response"] or {}).get("status_code"))

    def _count(self, name: str, status: int | None) -> None:
        self._answered.add(name)
        self.counts["completed" if status == 200 else "failed"] += 1

    def unanswered_lines(self) -> Iterator[Line]:
        """The requests without an answer, in their order."""
        names: set[str] = set()
        for number, data in _lines_of(self._source):
            line = _read_line(number, data, self._urls, names)
            if line.id not in self._answered:
                yield line

    def answer(self, line: Line, response: httpx.Response | None = None, error: tuple[str, str] = ("", "")) -> None:
        """Write the line of an answer. error: a code and a sentence, in place of a response."""
        fields: dict[str, Any] = {"id": line.id, "custom_id": line.custom_id, "response": None, "error": None}
        status = None if response is None else response.status_code
        if response is None:
            fields["error"] = dict(zip(("code", "message"), error, strict=True))
        else:
            fields["response"] = {"status_code": status, "request_id": line.id, "body": response.json()}
        data = json.dumps(fields).encode() + b"\n"
        self._check_room(len(data))
        with (self.output if status == 200 else self.errors).open("ab") as file:
            file.write(data)
        self._count(line.id, status)

    def answer_rest(self, error: tuple[str, str]) -> None:
        for line in self.unanswered_lines():
            self.answer(line, error=error)


def _lines_of(source: Path) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each line that is not empty, without what follows the first `_LONGEST` bytes."""
    with source.open("rb") as file:
        number, is_begun = 0, False
        while data := file.readline(_LONGEST):
            number += not is_begun
            if data.strip() and not is_begun:
                yield number, data.strip()
            is_begun = not data.endswith(b"\n")


def _read_line(number: int, data: bytes, urls: Sequence[str], names: set[str]) -> Line:
    """names: the custom_ids of earlier lines; gets the one of this line."""
    custom_id = None
    try:
        fields = read_json(data)
        custom_id = text("custom_id", fields.get("custom_id"))
        if custom_id in names:
            raise BadRequest("custom_id", "custom_id is that of an earlier line: each needs its own")
        one_of("method", fields.get("method"), ("POST",))
        url, body = one_of("url", fields.get("url"), urls), mapping("body", fields.get("body"))
        if flag("body.stream", body.get("stream") or False):
            raise BadRequest("body.stream", "body.stream is true, and an answer in a file is whole: leave it out")
        line = Line(_hash(data), custom_id, url, json.dumps(body).encode())
        names.add(custom_id)
        return line
    except (BadRequest, RecursionError) as error:
        message = f"line {number}: {getattr(error, 'message', 'the request is nested too deeply')}"
        return Line(_hash(b"%d %b" % (number, data)), custom_id, error=message)


def _hash(data: bytes) -> str:
    return f"batch_req_{hashlib.sha256(data).hexdigest()[:24]}"


async def answer_lines(
    files: LineFiles,
    app: ASGIApp,
    slots: asyncio.Semaphore,
    count: int,
    disk: ThreadPoolExecutor,
    say: Callable[[], None] = lambda: None,
) -> None:
    """Answer what has no answer yet, each by a request to `app`. slots: of requests at the same time, of which `count`
    may wait. disk: has one thread, in which all files are read and written. say: called after each answer. Raises
    OSError and EngineError."""
    lines, on_disk = files.unanswered_lines(), partial(asyncio.get_running_loop().run_in_executor, disk)

    async def work() -> None:
        while (line := await on_disk(next, lines, None)) is not None:
            if line.error:
                await on_disk(partial(files.answer, line, error=("invalid_request", line.error)))
            else:
                async with slots:
                    response = await _response(client, line)
                await on_disk(files.answer, line, response)
            say()

    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("batch", 0))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)


async def _response(client: httpx.AsyncClient, line: Line) -> httpx.Response:
    while True:
        response = await client.post(line.url, content=line.body, headers=_JSON)
        is_closing = response.status_code == 503 and response.json()["error"]["code"] == "closing"
        if response.status_code != 429 and not is_closing:
            return response
        await asyncio.sleep(_PAUSE)
