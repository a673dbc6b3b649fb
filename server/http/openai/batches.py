"""OpenAI's files of requests and its batches of them: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polarlm.engine import EngineError
from polarlm.engine.config import parse_size
from polarlm.engine.storage.files import lock
from polarlm.server.config import ServerConfig
from polarlm.server.http.bodies import announced_bytes, read_body, too_large
from polarlm.server.http.errors import CLOSE, ApiError
from polarlm.server.http.guard import OWNER
from polarlm.server.http.openai.lines import ENDPOINTS, LineFiles, answer_lines
from polarlm.server.http.streams import end_tasks
from polarlm.server.http.warnings import warn
from polarlm.server.reading.fields import unknown_fields
from polarlm.server.reading.values import BadRequest, count, mapping, one_of, text
from polarlm.server.running import journal
from polarlm.server.running.batches import BatchFolder, Record
from polarlm.server.running.refusals import server_closing

_LOG = logging.getLogger(__name__)
_AT_ONCE = 4  # requests of all batches that are computed, or wait, at the same time
_WINDOW = 24 * 3600  # seconds, after which a batch expires
_ENVELOPE = 1 << 16  # bytes of a form besides its file
_ANYONE = "anyone"  # who owns all files of a server without keys
_ENDED = ("completed", "failed", "expired", "cancelled")
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


class Batches:
    """The endpoints, which answer 501 without a folder, and what computes the batches in the background. `start` and
    `close` belong to the event loop of the server."""

    def __init__(self, config: ServerConfig, app: ASGIApp) -> None:
        """app: answers the requests of batches. Raises EngineError."""
        self._root, self._most, self._most_body = config.batches, parse_size(config.max_batches_size), config.max_body
        self._seconds, self._app = config.request_seconds, journal.JournalMiddleware(app)
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._running: dict[str, tuple[Record, asyncio.Task[None]]] = {}  # by the batch's id
        self._lock: BinaryIO | None = None
        if self._root is not None:
            BatchFolder(self._root, _ANYONE, self._most)

    def routes(self) -> list[Route]:
        routes: list[tuple[str, Callable[[Request, BatchFolder], Awaitable[Response]], str]] = [
            ("/files", self._upload, "POST"),
            ("/files", partial(self._list, kind="file-"), "GET"),
            ("/files/{id}", partial(self._one, kind="file"), "GET"),
            ("/files/{id}", self._delete, "DELETE"),
            ("/files/{id}/content", self._content, "GET"),
            ("/batches", self._create, "POST"),
            ("/batches", partial(self._list, kind="batch_"), "GET"),
            ("/batches/{id}", partial(self._one, kind="batch"), "GET"),
            ("/batches/{id}/cancel", self._cancel, "POST"),
        ]
        prefixes = ("/v1", "")
        return [Route(p + path, self._handler(one), methods=[verb]) for path, one, verb in routes for p in prefixes]

    def _handler(self, endpoint: Callable[[Request, BatchFolder], Awaitable[Response]]) -> Any:
        async def serve(request: Request) -> Response:
            if self._root is None:
                sentence = "This server keeps no files and runs no batches: start it with --batches FOLDER"
                raise ApiError(501, sentence, "not_supported")
            owner = request.scope.get(OWNER, _ANYONE)
            try:
                return await endpoint(request, await asyncio.to_thread(BatchFolder, self._root, owner, self._most))
            except OSError as error:
                raise _failure(error) from None

        return serve

    def start(self) -> None:
        """Go on with the batches that an earlier server left. Raises EngineError if another server runs them."""
        if self._root is None:
            return
        root = Path(self._root).expanduser()
        self._lock = (root / "lock").open("ab")
        try:
            lock(self._lock, waits=False)
        except BlockingIOError:
            sentence = f"--batches {self._root}: another server runs the batches of this folder; name another one"
            raise EngineError(sentence, "storage") from None
        for owner in (path.name for path in root.iterdir() if path.is_dir()):
            folder = BatchFolder(self._root, owner, self._most)
            for batch in reversed(folder.records("batch_")):
                if batch["status"] not in _ENDED:
                    self._begin(folder, batch)

    async def close(self) -> None:
        """Leave the batches as they are, for the next start."""
        await end_tasks(task for _, task in self._running.values())
        self._disk.shutdown(wait=False)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- files -------------------------------------------------------------------------------------------------

    async def _upload(self, request: Request, folder: BatchFolder) -> Response:
        """A form with `purpose` "batch" and the `file` → its record."""
        most, size = self._most + _ENVELOPE, 0

        async def receive() -> Message:
            nonlocal size
            message = await request.receive()
            size += len(message.get("body", b""))
            if size > most:
                raise too_large(self._most)
            return message

        if (announced_bytes(request) or 0) > most:
            raise too_large(self._most)
        try:
            form = await asyncio.wait_for(Request(request.scope, receive).form(), self._seconds)
        except (HTTPException, asyncio.TimeoutError) as error:
            reason = getattr(error, "detail", f"it takes more than {self._seconds} seconds")
            raise ApiError(400, f"The form cannot be read: {reason}", "invalid_request", headers=CLOSE) from None
        one_of("purpose", form.get("purpose"), ("batch",))
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise BadRequest("file", "file is missing: send it as a part of the form that has a file name")
        record = _file_record(_new_id("file-"), upload.size or 0, upload.filename or "", "batch")
        await asyncio.to_thread(folder.keep_lines, record, upload.file)
        return warn(JSONResponse(record), unknown_fields(dict(form), ("purpose", "file")))

    async def _list(self, request: Request, folder: BatchFolder, kind: str) -> Response:
        """The newest first: at most `limit` records, after the id `after`, of a `purpose`."""
        query, usual, running = request.query_params, 10_000 if kind == "file-" else 20, {**self._running}
        records = [_newest_record(one, running) for one in await asyncio.to_thread(folder.records, kind)]
        records = [one for one in records if query.get("purpose") in (None, one.get("purpose"))]
        if one_of("order", query.get("order", "desc"), ("desc", "asc")) == "asc":
            records.reverse()
        names = [one["id"] for one in records]
        first = names.index(query["after"]) + 1 if query.get("after") in names else 0
        end = first + count("limit", query.get("limit", usual), 1, 10_000)
        ids = dict.fromkeys(("first_id", "last_id"))
        if part := records[first:end]:
            ids = {"first_id": part[0]["id"], "last_id": part[-1]["id"]}
        return JSONResponse({"object": "list", "data": part, **ids, "has_more": end < len(records)})

    async def _one(self, request: Request, folder: BatchFolder, kind: str) -> Response:
        return JSONResponse(await self._find(request.path_params["id"], kind, folder))

    async def _content(self, request: Request, folder: BatchFolder) -> Response:
        record = await self._find(request.path_params["id"], "file", folder)
        return FileResponse(folder.lines(record["id"]), media_type="application/jsonl")

    async def _delete(self, request: Request, folder: BatchFolder) -> Response:
        name = (await self._find(request.path_params["id"], "file", folder))["id"]
        running = [batch for batch, _ in self._running.values() if batch["status"] not in _ENDED]
        if [batch for batch in running if batch["input_file_id"] == name]:
            raise ApiError(409, f"A batch reads {name}: cancel it, or wait for its end", "conflict", "id")
        await asyncio.to_thread(folder.remove, name)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    async def _find(self, name: str, kind: str, folder: BatchFolder, field: str = "id") -> Record:
        """The record of a "file" or a "batch". Raises ApiError if the owner of the folder has none."""
        running = {**self._running}
        record = await asyncio.to_thread(folder.record, name)
        if record is None or record["object"] != kind:
            raise ApiError(404, f"There is no {kind} {name!r} of yours", "not_found", field)
        return _newest_record(record, running)

    # -- batches -----------------------------------------------------------------------------------------------

    async def _create(self, request: Request, folder: BatchFolder) -> Response:
        body = await read_body(request, self._most_body)
        source = await self._find(text("input_file_id", body.get("input_file_id")), "file", folder, "input_file_id")
        endpoint = one_of("endpoint", body.get("endpoint"), ENDPOINTS)
        window = one_of("completion_window", body.get("completion_window"), ("24h",))
        created_at, entry = int(time.time()), journal.current()
        batch = {
            **{"id": _new_id("batch_"), "object": "batch", "endpoint": endpoint, "errors": None},
            **{"input_file_id": source["id"], "completion_window": window, "status": "validating"},
            **{"output_file_id": None, "error_file_id": None},
            **{"created_at": created_at, "expires_at": created_at + _WINDOW},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": mapping("metadata", body.get("metadata") or {}),
            "key_name": entry and entry.key,
        }
        await asyncio.to_thread(folder.keep, batch)
        self._begin(folder, batch)
        return warn(JSONResponse(batch), unknown_fields(body, _FIELDS))

    async def _cancel(self, request: Request, folder: BatchFolder) -> Response:
        batch = await self._find(request.path_params["id"], "batch", folder)
        if batch["status"] not in ("validating", "in_progress"):
            raise ApiError(409, f"The batch cannot be cancelled: it is {batch['status']}", "conflict", "id")
        if batch["id"] not in self._running:
            raise server_closing()
        self._running[batch["id"]][1].cancel()  # before its status can change
        await self._enter(folder, batch, "cancelling")
        return JSONResponse(batch)

    def _begin(self, folder: BatchFolder, batch: Record) -> None:
        if self._lock is not None:  # otherwise the next server begins it
            self._running[batch["id"]] = batch, asyncio.create_task(self._run(folder, batch))

    async def _run(self, folder: BatchFolder, batch: Record) -> None:
        """Compute a batch to its end; one that an earlier server has begun, from where it was."""
        output, errors = (folder.lines(_output_id(batch, kind)) for kind in ("output", "errors"))
        source, urls = folder.lines(batch["input_file_id"]), (batch["endpoint"],)
        files = LineFiles(source, output, errors, urls, folder.check_room)
        batch["request_counts"] = files.counts
        try:
            await self._finish(folder, batch, files, await self._compute(folder, batch, files))
        except asyncio.CancelledError:
            if batch["status"] != "cancelling":
                raise
            await self._finish(folder, batch, files, "cancelled")
        except Exception as error:
            if not isinstance(error, EngineError):
                _LOG.exception("%s ended with an unexpected error", batch["id"])
                error = _failure(error)
            batch["errors"] = {"object": "list", "data": [{"code": error.code, "message": str(error)}]}
            with suppress(OSError):
                await self._finish(folder, batch, files, "failed")
        finally:
            del self._running[batch["id"]]

    async def _compute(self, folder: BatchFolder, batch: Record, files: LineFiles) -> str:
        """Answer the lines of a batch, and return how it ends. Raises OSError and EngineError."""
        await self._on_disk(files.open)
        if not files.counts["total"]:
            raise EngineError("The file has no lines: write a request on each", "empty_file")
        if batch["status"] == "cancelling":
            return "cancelled"
        if batch["status"] == "validating":
            await self._enter(folder, batch, "in_progress")

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[journal.KEY], scope[journal.BACKGROUND] = batch["key_name"], True
            await self._app(scope, receive, send)

        answers = answer_lines(files, app, self._slots, _AT_ONCE, self._disk)
        try:
            await asyncio.wait_for(answers, max(0.0, batch["expires_at"] - time.time()))
        except asyncio.TimeoutError:
            expired = "batch_expired", "The batch expired before this request was computed"
            await self._on_disk(files.answer_rest, expired)
            return "expired"
        return "completed"

    async def _finish(self, folder: BatchFolder, batch: Record, files: LineFiles, status: str) -> None:
        """Give the files of answers their records, and let the batch end."""
        if status == "completed":
            await self._enter(folder, batch, "finalizing")

        def keep_files() -> None:
            for field, kind, path in (("output", "output", files.output), ("error", "errors", files.errors)):
                if path.exists():
                    name = _output_id(batch, kind)
                    size = path.stat().st_size
                    folder.keep(_file_record(name, size, path.name, "batch_output"))
                    batch[f"{field}_file_id"] = name

        await self._on_disk(keep_files)
        await self._enter(folder, batch, status)

    async def _enter(self, folder: BatchFolder, batch: Record, status: str) -> None:
        batch |= {"status": status, f"{status}_at": int(time.time())}
        await self._on_disk(folder.keep, dict(batch))

    def _on_disk(self, *work: Any) -> Awaitable[Any]:
        """The result of a function, which runs in the only thread, after those before, even if nobody waits."""
        return asyncio.get_running_loop().run_in_executor(self._disk, *work)


def _failure(error: Exception) -> EngineError:
    reason = getattr(error, "strerror", None) or type(error).__name__
    return EngineError(f"Files of batches cannot be read or written now: {reason}", "storage")


def _newest_record(record: Record, running: Mapping[str, tuple[Record, Any]]) -> Record:
    """The record of a batch that ran when its folder began to be read: what was read may be older."""
    return running[record["id"]][0] if record["id"] in running else record


def _new_id(prefix: str) -> str:
    """An id that is greater than earlier ones."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(4)}"


def _output_id(batch: Record, kind: str) -> str:
    return f"file-{batch['id'].removeprefix('batch_')}-{kind}"


def _file_record(name: str, size: int, filename: str, purpose: str) -> Record:
    fields = {"id": name, "object": "file", "bytes": size, "created_at": int(time.time())}
    return {**fields, "filename": filename, "purpose": purpose, "status": "processed"}
