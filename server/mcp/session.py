"""The sessions with MCP servers: each is opened when it is first needed, and again after it has ended."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polarlm.children import Child, python
from polarlm.server.config import ServerConfig
from polarlm.server.mcp.file import McpServer, read_mcp_file
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
        self._ended: asyncio.Future[None] | None = None  # done when the child has ended
        self._opening: asyncio.Future[None] | None = None
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0

    async def connect(self) -> None:
        """Return when the server is ready. Raises McpError. Cancelling it leaves the connection to others."""
        if self.state == READY:
            return
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

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
            said = await asyncio.wait_for(answer, seconds)
        except asyncio.TimeoutError:
            raise McpError(f"{tool} of {self.name} has not answered within {seconds:.0f} seconds") from None
        finally:
            del self._calls[number]
            if answer.cancelled():
                child.tell({"cancel": number})
        return {"text": said["text"], "is_error": said["is_error"]}

    async def close(self) -> None:
        if self._child is None or self._ended is None:
            return
        self._child.close()
        _, late = await asyncio.wait([self._ended], timeout=_END_SECONDS)
        if late:
            self._child.kill()
            await asyncio.wait([self._ended])

    def _opened(self, opening: asyncio.Future[None]) -> None:
        self._opening = None
        error = None if opening.cancelled() else opening.exception()  # nobody may wait for it any more
        if self.state == CONNECTING:  # such as too many open files
            self.state, self.trouble = FAILED, f"It could not be started: {error}"

    async def _open(self) -> None:
        self.state, self.trouble = CONNECTING, None
        if self._ended is not None:
            await asyncio.wait([self._ended])  # the last child is gone
        loop = asyncio.get_running_loop()
        ready, ended = loop.create_future(), loop.create_future()
        child = Child(
            python("polarlm.server.mcp.client", self.name),  # the name is for lists of processes
            lambda said: loop.call_soon_threadsafe(self._hear, ready, said),
            lambda code: loop.call_soon_threadsafe(self._end, ended),
            most=_LINE + 6 * self._most,  # JSON writes a character in up to six
            errors=subprocess.DEVNULL,
        )
        self._child, self._ended = child, ended
        child.tell({"server": asdict(self._server), "most": self._most})
        await asyncio.wait([ready, ended], timeout=_CONNECT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() and not ended.done():
            await self.close()
            self.trouble = f"It has not answered within {_CONNECT_SECONDS:.0f} seconds"
        if self.state != READY:
            raise McpError(f"{self.name}: {self.trouble}")

    def _hear(self, ready: asyncio.Future[None], said: dict[str, Any]) -> None:
        if "tools" in said:
            self.tools = _read_tools(self.name, said["tools"])
            self.state = READY
            ready.set_result(None)
        elif "failed" in said:
            self.trouble = said["failed"]
        elif (answer := self._calls.get(said["call"])) is not None and not answer.done():
            answer.set_result(said)

    def _end(self, ended: asyncio.Future[None]) -> None:
        assert self._child is not None
        if self._child.broke_off:
            self.trouble = "It sent more than can be read, and was ended"
        self.state, self.trouble = FAILED, self.trouble or "It has ended"
        ended.set_result(None)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(McpError(f"{self.name}: {self.trouble}"))


def _read_tools(server: str, tools: Sequence[dict[str, Any]]) -> list[Tool]:
    """The tools of a server, each with the name that models call it by: the server's name and the tool's."""
    read: list[Tool] = []
    for tool in tools:
        name = re.sub("[^A-Za-z0-9_-]+", "_", f"{server}_{tool['name']}")[:_NAME]
        function = {**tool, "name": name}
        trouble = None
        try:
            read_tools({"messages": [], "tools": [{"type": "function", "function": function}]})
        except BadRequest as error:
            trouble = error.message.replace("tools[0].function", "the tool")
        if any(name == other.function["name"] for other in read):
            trouble = "another tool of this server has the same name"
        read.append(Tool(tool["name"], function, trouble))
    return read
