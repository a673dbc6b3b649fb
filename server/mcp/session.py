"""MCP servers: the file of --mcp-config, and sessions, each opened when it is first needed, and again after its end."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polarlm.children import Child, python
from polarlm.engine import EngineError
from polarlm.server.config import ServerConfig
from polarlm.server.reading.tools import read_tools
from polarlm.server.reading.values import BadRequest

OFF, CONNECTING, READY, FAILED = "off", "connecting", "ready", "failed"

_CONNECT_SECONDS = 60.0  # the first start of a program may download it
_LINE = 8 << 20  # bytes of a line of the child, besides an answer: a list of tools
_NAME = 64  # characters that many models' templates and other APIs take
_END_SECONDS = 10.0  # for the child to end the server in order, which takes up to 6


class McpError(Exception):
    """A server cannot be used, or a call has not ended. The message is a sentence."""


@dataclass(frozen=True)
class Tool:
    """A tool of a server: its name there, and the function, in OpenAI's form, that models call. `trouble`: why not."""

    name: str
    function: dict[str, Any]
    trouble: str | None


class McpServers:
    """A session for each server of the file; whoever makes it closes it, in the same event loop."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises EngineError if the file is wrong. Without --mcp-config there are none."""
        servers = [] if config.mcp_config is None else read_mcp_file(config.mcp_config)
        most = config.max_body // 4  # a conversation has others, too, and is sent as a whole
        self.sessions = {server.name: Session(server, most) for server in servers}

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self.sessions.values()))


class Session:
    def __init__(self, server: McpServer, most: int) -> None:
        """most: bytes that an answer may have."""
        self.name = server.name
        self.state = OFF
        self.trouble: str | None = None  # a sentence about why it failed
        self.tools: list[Tool] = []
        self._server, self._most = server, most
        self._child: Child | None = None
        self._end_future: asyncio.Future[None] | None = None  # done when the child has ended
        self._open_task: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0

    async def connect(self) -> None:
        """Return when the server is ready. Raises McpError. Cancelling it leaves the connection to others."""
        if self.state == READY:
            return
        if self._open_task is None:
            self._open_task = asyncio.ensure_future(self._open())
            self._open_task.add_done_callback(self._on_opened)
        await asyncio.shield(self._open_task)

    async def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        """{"text", "is_error"} of a call. Raises McpError. Cancelling it cancels the call."""
        await self.connect()
        if self.state != READY:
            raise McpError(f"{self.name}: {self.trouble}")
        self._last += 1
        number, answer = self._last, asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        assert self._child is not None
        child = self._child
        child.tell({"call": number, "tool": tool, "arguments": arguments})
        try:
            message = await asyncio.wait_for(answer, seconds)
        except asyncio.TimeoutError:
            raise McpError(f"{tool} of {self.name} has not answered within {seconds:.0f} seconds") from None
        finally:
            del self._calls[number]
            if answer.cancelled():
                child.tell({"cancel": number})
        return {"text": message["text"], "is_error": message["is_error"]}

    async def close(self) -> None:
        if self._child is None or self._end_future is None:
            return
        self._child.close()
        _, pending = await asyncio.wait([self._end_future], timeout=_END_SECONDS)
        if pending:
            self._child.kill()
            await asyncio.wait([self._end_future])

    def _on_opened(self, opening: asyncio.Future[None]) -> None:
        self._open_task = None
        error = None if opening.cancelled() else opening.exception()  # nobody may wait for it any more
        if self.state == CONNECTING:  # such as too many open files
            self.state, self.trouble = FAILED, f"It could not be started: {error}"

    async def _open(self) -> None:
        self.state, self.trouble = CONNECTING, None
        if self._end_future is not None:
            await asyncio.wait([self._end_future])  # the last child is gone
        loop = asyncio.get_running_loop()
        ready_future, end_future = loop.create_future(), loop.create_future()
        child = Child(
            python("polarlm.server.mcp.client", self.name),  # the name is for lists of processes
            lambda message: loop.call_soon_threadsafe(self._on_message, ready_future, message),
            lambda code: loop.call_soon_threadsafe(self._on_end, end_future),
            most=_LINE + 6 * self._most,  # JSON writes a character in up to six
            errors=subprocess.DEVNULL,
        )
        self._child, self._end_future = child, end_future
        child.tell({"server": asdict(self._server), "most": self._most})
        await asyncio.wait([ready_future, end_future], timeout=_CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not ready_future.done() and not end_future.done():
            await self.close()
            self.trouble = f"It has not answered within {_CONNECT_SECONDS:.0f} seconds"
        if self.state != READY:
            raise McpError(f"{self.name}: {self.trouble}")

    def _on_message(self, ready: asyncio.Future[None], message: dict[str, Any]) -> None:
        if "tools" in message:
            self.tools = _read_tools(self.name, message["tools"])
            self.state = READY
            ready.set_result(None)
        elif "failed" in message:
            self.trouble = message["failed"]
        elif (answer := self._calls.get(message["call"])) is not None and not answer.done():
            answer.set_result(message)

    def _on_end(self, end_future: asyncio.Future[None]) -> None:
        assert self._child is not None
        if self._child.broke_off:
            self.trouble = "It sent more than can be read, and was ended"
        self.state, self.trouble = FAILED, self.trouble or "It has ended"
        end_future.set_result(None)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(McpError(f"{self.name}: {self.trouble}"))


def _read_tools(server: str, tools: Sequence[dict[str, Any]]) -> list[Tool]:
    """The tools of a server, each with the name that models call it by: the server's name and the tool's."""
    named_tools: list[Tool] = []
    for tool in tools:
        name = re.sub("[^A-Za-z0-9_-]+", "_", f"{server}_{tool['name']}")[:_NAME]
        function = {**tool, "name": name}
        trouble = None
        try:
            read_tools({"messages": [], "tools": [{"type": "function", "function": function}]})
        except BadRequest as error:
            trouble = error.message.replace("tools[0].function", "the tool")
        if any(name == other.function["name"] for other in named_tools):
            trouble = "another tool of this server has the same name"
        named_tools.append(Tool(tool["name"], function, trouble))
    return named_tools


_HTTP = {"http", "streamable-http", "streamableHttp", "streamable_http"}  # names of programs for the same transport
_EXAMPLE = '{"mcpServers": {"NAME": {"command": "…", "args": ["…"]}}}, or {"url": "https://…"} in place of the command'


@dataclass(frozen=True)
class McpServer:
    """An MCP server: a program that is started, or an address."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def secrets(self) -> list[str]:
        """What no sentence about this server may contain, longest first."""
        address = urlsplit(self.url or "")
        values = [*self.env.values(), *self.headers.values(), address.query, address.password or ""]
        words = {word for value in values for word in (value, *value.split())}
        return sorted((word for word in words if len(word) >= 6), key=len, reverse=True)


def read_mcp_file(path: str) -> list[McpServer]:
    """The servers in a file as Claude Desktop and Cursor have them, but for `disabled` ones. Raises EngineError."""
    try:
        value = json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise EngineError(f"--mcp-config {path} cannot be read: {error.strerror}", "mcp") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"--mcp-config {path} is not JSON: {error}", "mcp") from None
    servers = value.get("mcpServers") if isinstance(value, dict) else None
    if not isinstance(servers, dict):
        raise EngineError(f"--mcp-config {path} names no servers: it has to be {_EXAMPLE}", "mcp")
    enabled_servers = []
    for name, entry in servers.items():
        if isinstance(entry, dict) and entry.get("disabled") is True:
            continue
        try:
            enabled_servers.append(_server(name, entry))
        except ValueError as error:
            raise EngineError(f"--mcp-config {path}: the server {name!r} {error}", "mcp") from None
    return enabled_servers


def _server(name: str, entry: Any) -> McpServer:
    if not isinstance(entry, dict):
        raise ValueError(f"has to be an object: {_EXAMPLE}")
    if re.fullmatch(r"[^\x00-\x1f\x7f]{1,64}", name) is None:
        raise ValueError("needs a name of 1 to 64 characters, without control characters")
    command, url, kind = (entry.get(key) for key in ("command", "url", "type"))
    if (command is None) == (url is None):
        raise ValueError("needs either a command or a url")
    if kind not in (None, *({"stdio"} if url is None else _HTTP)):
        raise ValueError(f"is of type {kind!r}: a command is of type stdio, and a url of type http")
    if url is not None:
        if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError("needs a url that begins with http:// or https://")
        return McpServer(name, url=url, headers=_strings(entry, "headers"))
    args, cwd = entry.get("args", []), entry.get("cwd")
    if not _is_text(command) or not command:
        raise ValueError("needs a command that is text")
    if not isinstance(args, list) or not all(map(_is_text, args)):
        raise ValueError("needs args that are an array of strings")
    if cwd is not None and not _is_text(cwd):
        raise ValueError("needs a cwd that is text")
    return McpServer(name, command, tuple(args), _strings(entry, "env"), cwd)


def _strings(entry: Mapping[str, Any], key: str) -> dict[str, str]:
    value = entry.get(key, {})
    if not isinstance(value, dict) or not all(map(_is_text, value.values())):
        raise ValueError(f"needs {key} that are an object of strings")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value
