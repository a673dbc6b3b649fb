"""Files of requests in the format of OpenAI's batches, a JSON object on each line, and the lines that answer them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note
from polarlm.engine.storage.files import lock
from polarlm.server.http.streams import end_tasks
from polarlm.server.reading.values import BadRequest, flag, mapping, one_of, read_json, text
from polarlm.server.running.listening import lost_peer_options

_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_LONGEST = 64 << 20  # bytes of a line; what is longer is damaged
_HEAD = b'{"id": "batch_req_'  # of each line of an answer
_IN_BACKGROUND = {"service_tier": "flex"}  # of each request that names no other tier
_JSON = {"Content-Type": "application/json"}
_TIMEOUT = httpx.Timeout(10.0, read=None, pool=None)  # an answer takes as long as it takes
_PATIENCE = 600.0  # seconds without an answer, until a server is given up
_PAUSES = (1.0, 30.0)  # seconds before a request is sent again: the first, which is doubled up to the last
_LONGEST_PAUSE = 60.0  # seconds, if the server names more
_AWAY = (502, 503, 504)  # statuses of a server that is not there, unless an error has a code of its own
_AWAY_CODES = (None, "closing", "closed", 503)


@dataclass(frozen=True)
class Line:
    """A request of a file. The id is a hash of the line; `error` is a sentence about one that is no request."""

    id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""  # JSON
    error: str = ""


class LineFiles:
    """A context with a file of requests, and the file that gets a line for each: one that it has is not written again.
    All methods block on the disk, and raise OSError."""

    def __init__(self, source: Path, output: Path) -> None:
        self._source, self._output = source, output
        self.completed = self.failed = 0  # lines of the output
        self._answered: set[str] = set()

    def __enter__(self) -> LineFiles:
        """Read which requests have an answer. One that was being written when its process ended is cut off. Raises
        EngineError if the file of answers has other lines, or another process writes it."""
        self._file = self._output.open("a+b")
        try:
            self._read_answers()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def _read_answers(self) -> None:
        try:
            lock(self._file, waits=False)
        except BlockingIOError:
            raise EngineError(f"{self._output}: another process writes answers to it: wait for its end") from None
        self._file.seek(0)
        end = 0
        for data in self._file:
            if data[: len(_HEAD)] != _HEAD[: len(data)]:
                raise EngineError(f"{self._output.name} has lines that answer no batch: name another file")
            if not data.endswith(b"\n"):
                self._file.truncate(end)
                break
            end += len(data)
            answer = json.loads(data)
            self._count(answer["id"], (answer["response"] or {}).get("status_code"))

    def _count(self, name: str, status: int | None) -> None:
        self._answered.add(name)
        self.completed += status == 200
        self.failed += status != 200

    def unanswered_lines(self) -> Iterator[Line]:
        """The requests without an answer, in their order."""
        names: set[str] = set()
        for number, data in _lines_of(self._source):
            line = _read_line(number, data, names)
            if line.id not in self._answered:
                yield line

    def answer(self, line: Line, response: httpx.Response | None = None) -> None:
        """Write the line of an answer: without a response, what is wrong with the request."""
        fields: dict[str, Any] = {"id": line.id, "custom_id": line.custom_id, "response": None, "error": None}
        status = None if response is None else response.status_code
        if response is None:
            fields["error"] = {"code": "invalid_request", "message": line.error}
        else:
            fields["response"] = {"status_code": status, "request_id": line.id, "body": response.json()}
        self._file.write(json.dumps(fields).encode() + b"\n")
        self._file.flush()  # so that it is there whatever ends this process
        self._count(line.id, status)


def _lines_of(source: Path) -> Iterator[tuple[int, bytes]]:
    """(number, content) of each line that is not empty, without what follows the first `_LONGEST` bytes."""
    with source.open("rb") as file:
        number, is_begun = 0, False
        while data := file.readline(_LONGEST):
            number += not is_begun
            if data.strip() and not is_begun:
                yield number, data.strip()
            is_begun = not data.endswith(b"\n")


def _read_line(number: int, data: bytes, names: set[str]) -> Line:
    """names: the custom_ids of earlier lines; gets the one of this line."""
    custom_id = None
    try:
        fields = read_json(data)
        custom_id = text("custom_id", fields.get("custom_id"))
        if custom_id in names:
            raise BadRequest("custom_id", "custom_id is that of an earlier line: each needs its own")
        one_of("method", fields.get("method"), ("POST",))
        url, body = one_of("url", fields.get("url"), _ENDPOINTS), mapping("body", fields.get("body"))
        if flag("body.stream", body.get("stream") or False):
            raise BadRequest("body.stream", "body.stream is true, and an answer in a file is whole: leave it out")
        line = Line(_hash(data), custom_id, url, json.dumps(_IN_BACKGROUND | body).encode())
        names.add(custom_id)
        return line
    except (BadRequest, RecursionError) as error:
        message = f"line {number}: {getattr(error, 'message', 'the request is nested too deeply')}"
        return Line(_hash(b"%d %b" % (number, data)), custom_id, error=message)


def _hash(data: bytes) -> str:
    return f"batch_req_{hashlib.sha256(data).hexdigest()[:24]}"


async def answer_lines(files: LineFiles, client: httpx.AsyncClient, count: int, say: Callable[[], None]) -> None:
    """Answer what has no answer yet, by requests of `client`, `count` at a time. say: called after each answer. Raises
    OSError, and EngineError if there is no server that answers."""
    lines, sender = files.unanswered_lines(), _Sender(client)

    async def work() -> None:
        while (line := await on_disk(next, lines, None)) is not None:
            response = None if line.error else await sender.send(line)
            await on_disk(files.answer, line, response)
            say()

    with ThreadPoolExecutor(1, thread_name_prefix="lines") as disk:  # files are read and written in turn
        on_disk = partial(asyncio.get_running_loop().run_in_executor, disk)
        tasks = [asyncio.create_task(work()) for _ in range(count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)


def send_lines(
    url: str, key: str, files: LineFiles, count: int, progress: AbstractContextManager[Callable[[str], None]]
) -> None:
    """`answer_lines` by the server at a URL, with or without the path /v1. key: its API key, or "". progress: yields a
    function that is called after each answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = url.rstrip("/").removesuffix("/v1")
    transport = httpx.AsyncHTTPTransport(socket_options=lost_peer_options())

    async def send(say: Callable[[str], None]) -> None:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT, transport=transport) as client:
            await answer_lines(files, client, count, lambda: say(""))

    with progress as say:
        asyncio.run(send(say))


class _Sender:
    """Sends lines to a server. One that is away, or busy, is waited for as long as `_PATIENCE` says."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client, self._url = client, str(client.base_url).rstrip("/")
        self._away_since: float | None = None  # without an answer to any line

    async def send(self, line: Line) -> httpx.Response:
        """Return the response, which has JSON. Raises EngineError."""
        usual_pause, last_pause = _PAUSES
        while True:
            pause = usual_pause
            try:
                response = await self._client.post(line.url, content=line.body, headers=_JSON)
            except httpx.RequestError as error:
                reason = str(error) or type(error).__name__
            else:
                if not _is_away(response):
                    self._away_since = None
                    return self._checked(response)
                reason = f"status {response.status_code}, {response.reason_phrase}"
                if (seconds := response.headers.get("retry-after", "")).isdecimal():
                    pause = min(float(seconds), _LONGEST_PAUSE)
            self._be_patient(reason)
            await asyncio.sleep(pause)
            usual_pause = min(2 * usual_pause, last_pause)

    def _be_patient(self, reason: str) -> None:
        """Say that the server is waited for. Raises EngineError if that has taken too long."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            note(f"{self._url} answers no request now ({reason}): waiting for it, {_PATIENCE / 60:.0f} minutes at most")
        elif time.monotonic() - self._away_since > _PATIENCE:
            sentence = f"{self._url} has answered no request for {_PATIENCE / 60:.0f} minutes ({reason})"
            raise EngineError(f"{sentence}: call this again once it does, which goes on with the lines that are left")

    def _checked(self, response: httpx.Response) -> httpx.Response:
        """A response that is an answer to its line. Raises EngineError for one that all lines would get."""
        what = f"{self._url} answers with status {response.status_code}"
        if response.status_code in (401, 403):
            raise EngineError(f"{what}, {response.reason_phrase}: give its key by --api-key")
        if _body_of(response) is None:
            raise EngineError(f"{what} and no JSON: give the URL of a server of OpenAI's API")
        return response


def _is_away(response: httpx.Response) -> bool:
    """Whether a server is busy or away for a while."""
    body = _body_of(response)
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return response.status_code == 429 or (response.status_code in _AWAY and code in _AWAY_CODES)


def _body_of(response: httpx.Response) -> Any:
    """The JSON of a response; None if it has none."""
    with suppress(ValueError):
        return response.json()
    return None
