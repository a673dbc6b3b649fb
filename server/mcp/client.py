"""The process that is the client of one MCP server. A fault of that server ends this process and no other.

It speaks JSON lines with its parent, over standard input and output:

    parent → child  {"server": an McpServer, as an object, "most": bytes that an answer may have}
    child → parent  {"tools": [{"name", "description", "parameters"}]}
    parent → child  {"call": N, "tool", "arguments"}, and {"cancel": N}
    child → parent  {"call": N, "text", "is_error"}
    child → parent  {"failed": a sentence}, and the process ends

It ends, and the server's process with it, when its parent does: its standard input is then closed. On Linux whatever
the server has started ends as well, even in sessions of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TextIO

import anyio
import anyio.abc
import httpx2
import psutil
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError
from pydantic import ValidationError

from polarlm.children import Parent
from polarlm.server.mcp.session import McpServer

_MEMORY = 32 << 20  # bytes that what a server sends may take here, besides several times what an answer may have
_LOOK_SECONDS = 0.1  # between two looks at that
_MESSAGES = 10_000  # that a server may send between two answers
_PAGES = 20  # most pages of a list of tools
_GONE = {-32000, -32600}  # codes of errors after which a connection is of no use: closed; the session is not known
_STDERR = 4096  # characters of a program's messages that are kept
_ID = re.compile(r'"id"\s*:\s*(\d{1,15})')
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_ROUNDS, _ROUND_SECONDS = 20, 0.1  # rounds of killing, since a process may start others meanwhile
_ParentMessages = asyncio.Queue[dict[str, Any] | None]  # what the parent says; None when it is gone


class _Trouble(Exception):
    """The server cannot be used; the message is a sentence."""


class _WatchedStream(anyio.abc.ObjectReceiveStream[Any]):
    """A transport's stream of messages from the server, which counts them and tells when it ends. An answer that cannot
    be parsed becomes an error for the request that waits for it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.since_answer = 0
        self.end_event = anyio.Event()

    async def receive(self) -> Any:
        try:
            message = await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self.end_event.set()
            raise
        self.since_answer += 1
        return _unreadable(message) if isinstance(message, ValidationError) else message

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _StandardError:
    def __init__(self) -> None:
        read, write = os.pipe()
        self.file: TextIO = os.fdopen(write, "w")
        self._tail = b""
        threading.Thread(target=self._read, args=(read,), name="stderr", daemon=True).start()

    def last_line(self) -> str:
        """The last line that is not empty, after a colon; empty if there is none."""
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        return next((f": {line[:300]}" for line in reversed(lines) if line), "")

    def _read(self, end: int) -> None:
        while data := os.read(end, 1 << 16):
            self._tail = (self._tail + data)[-_STDERR:]


class _Session:
    _client: Client

    def __init__(self, parent: Parent, messages: _ParentMessages, server: McpServer, most: int) -> None:
        self._parent, self._parent_messages, self._server, self._most = parent, messages, server, most
        self._stderr = _StandardError() if server.url is None else None
        self._calls: dict[int, anyio.CancelScope] = {}
        self._stream: _WatchedStream | None = None
        self._status = ""  # the HTTP status of an address that answers with an error, in brackets
        self._programs: set[int] | None = None  # the processes that the transport has started, once they are known

    async def run(self) -> None:
        """Serve the parent until it is gone. Raises _Trouble, MCPError, or what the transport raises."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            group.start_soon(self._obey, group)
            async with Client(self._transport(), cache=None) as self._client:
                self._parent.tell({"tools": await _tools(self._client)})
                assert self._stream is not None
                await self._stream.end_event.wait()
                raise _Trouble("It has ended")

    async def _obey(self, group: anyio.abc.TaskGroup) -> None:
        """Make the parent's calls, and end the session when it is gone."""
        while (message := await self._parent_messages.get()) is not None:
            if "cancel" not in message:
                group.start_soon(self._call, message["call"], message["tool"], message["arguments"])
            elif scope := self._calls.get(message["cancel"]):
                scope.cancel()
        group.cancel_scope.cancel()

    def trouble(self, error: BaseException) -> str:
        """A sentence about what ended the session, without secrets."""
        while inner := getattr(error, "exceptions", ()):  # a group, which Python 3.10 has no name for
            error = next((one for one in inner if isinstance(one, _Trouble)), inner[0])
        detail = self._status if self._stderr is None else self._stderr.last_line()
        if isinstance(error, (_Trouble, MCPError)):
            sentence = f"{str(error).rstrip('.') or 'It could not be connected to'}{detail}"
        elif isinstance(error, FileNotFoundError) and self._server.command is not None:
            sentence = f"There is no program {self._server.command}, or no folder to start it in"
        elif isinstance(error, OSError):
            sentence = f"It cannot be started: {error.strerror or error}"
        elif isinstance(error, ValueError):
            sentence = f"It does not keep to the protocol ({str(error)[:200]})"
        else:
            sentence = f"The connection failed ({type(error).__name__}: {str(error)[:300]}){detail}"
        return self._without_secrets(" ".join(sentence.split()))

    def _without_secrets(self, text: str) -> str:
        for secret in self._server.secrets():
            text = text.replace(secret, "…")
        return text

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        server = self._server
        if server.url is not None:
            wait = httpx2.Timeout(30, read=None)  # the parent limits the time of a call
            headers, hooks = dict(server.headers), {"response": [self._heed]}
            async with (
                httpx2.AsyncClient(headers=headers, timeout=wait, event_hooks=hooks) as web,
                streamable_http_client(server.url, http_client=web) as (read, write),
            ):
                self._stream = _WatchedStream(read)
                yield self._stream, write
            return
        assert server.command is not None
        assert self._stderr is not None
        args, env = list(server.args), dict(server.env)
        program = StdioServerParameters(
            command=server.command, args=args, env=env, cwd=server.cwd, encoding_error_handler="replace"
        )
        async with stdio_client(program, self._stderr.file) as (read, write):
            self._stderr.file.close()  # so that the pipe ends when the program does
            self._programs = {child.pid for child in psutil.Process().children()}
            self._stream = _WatchedStream(read)
            yield self._stream, write

    async def _heed(self, response: httpx2.Response) -> None:
        self._status = f" (status {response.status_code})" if response.status_code >= 400 else ""

    async def _watch(self) -> None:
        """Raises _Trouble for a server that sends too much. Buries what the server has left behind."""
        memory = psutil.Process().memory_info
        most = memory().rss + _MEMORY + 8 * self._most
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            _bury(self._programs)
            if memory().rss > most:
                raise _Trouble("It sent more than can be read, and was ended")
            if self._stream is not None and self._stream.since_answer > _MESSAGES:
                raise _Trouble("It sent messages without end, and was ended")

    async def _call(self, number: int, tool: str, arguments: dict[str, Any]) -> None:
        with anyio.CancelScope() as scope:
            self._calls[number] = scope
            try:
                text, is_error = _answer(await self._client.call_tool(tool, arguments))
            except MCPError as error:
                if error.error.code in _GONE:
                    raise _Trouble(f"It could not be reached ({error.error.message})") from None
                text, is_error = error.error.message, True
            except (RuntimeError, ValueError) as error:  # an answer that is not of the tool's own schema
                text, is_error = f"The tool's answer is not what it says of itself: {str(error)[:1000]}", True
            finally:
                del self._calls[number]
            assert self._stream is not None
            self._stream.since_answer = 0
            if len(text.encode()) > self._most:
                text = f"The tool's answer has {len(text):,} characters, more than a conversation can take up here"
                is_error = True
            text = self._without_secrets(text) if is_error else text
            self._parent.tell({"call": number, "text": text, "is_error": is_error})


async def _tools(client: Client) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    cursor = None
    for _ in range(_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [
            {"name": tool.name, "description": tool.description or tool.title, "parameters": tool.input_schema}
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise _Trouble(f"Its list of tools has more than {_PAGES} pages")


def _unreadable(error: ValidationError) -> SessionMessage | ValidationError:
    """The error that an unreadable answer becomes for its request; `error` itself if the message answers no request."""
    problem = error.errors(include_url=False)[0]
    answer = problem["input"]
    if isinstance(answer, str):  # no JSON, or JSON that the protocol's own package does not read
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            number = _ID.search(answer) if '"jsonrpc"' in answer else None
            answer = {"jsonrpc": "2.0", "id": number and int(number[1])}
    if (
        not isinstance(answer, dict)
        or "jsonrpc" not in answer
        or "method" in answer
        or not isinstance(answer.get("id"), int)
    ):
        return error  # such as a line of a log
    error_data = ErrorData(code=PARSE_ERROR, message=f"The answer cannot be read ({problem['msg']})")
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=answer["id"], error=error_data))


def _answer(result: Any) -> tuple[str, bool]:
    """The text of a tool's answer, in which what is no text is named; and whether it is an error."""
    parts = list(_parts(result.content))
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n\n".join(parts), bool(result.is_error)


def _parts(content: list[Any]) -> Iterator[str]:
    for part in content:
        resource = getattr(part, "resource", None)
        if part.type == "text":
            yield part.text
        elif part.type == "resource_link":
            yield f"[{part.name}: {part.uri}]"
        elif resource is not None and getattr(resource, "text", None) is not None:
            yield f"{resource.uri}:\n{resource.text}"
        else:
            data = part.data if resource is None else resource.blob
            media = (part if resource is None else resource).mime_type or "data"
            size = max(1, len(data) * 3 // 4 // 1000)
            yield f"[{part.type}, {media}, {size:,} kB: only text is passed on]"


def _bury(programs: set[int] | None) -> None:
    """Take the exit status of an adopted process that has ended. programs: the transport takes theirs."""
    if sys.platform != "linux" or programs is None:
        return
    with suppress(ChildProcessError):
        status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None and status.si_pid not in programs:
            os.waitpid(status.si_pid, os.WNOHANG)


def _end_all() -> None:
    for _ in range(_ROUNDS):
        processes = psutil.Process().children(recursive=True)
        if not processes:
            return
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=_ROUND_SECONDS)


async def _main() -> None:
    messages: _ParentMessages = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def hear(line: dict[str, Any] | None) -> None:
        loop.call_soon_threadsafe(messages.put_nowait, line)

    parent = Parent(hear, lambda: hear(None))
    first = await messages.get()
    if first is None:
        return
    if sys.platform == "linux":  # become the parent of what the server starts and leaves behind
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    session = _Session(parent, messages, McpServer(**first["server"]), first["most"])
    try:
        await session.run()
    except Exception as error:  # whatever it is, the parent tells the user
        parent.tell({"failed": session.trouble(error)})
    finally:
        _end_all()


def main() -> int:
    logging.disable()  # what the server sends goes nowhere
    asyncio.run(_main())
    return 0


if __name__ == "__main__":
    sys.exit(main())
