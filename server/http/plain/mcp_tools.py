"""/mcp: the tools of MCP servers, for the chat page, whose user confirms each call."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.server.config import ServerConfig
from polarlm.server.http.bodies import read_body
from polarlm.server.http.errors import ApiError
from polarlm.server.http.guard import is_here
from polarlm.server.http.streams import while_connected
from polarlm.server.mcp.session import READY, McpError, McpServers, Session
from polarlm.server.reading.values import BadRequest, mapping, text

_FORWARDED = {"forwarded", "x-forwarded-for", "x-real-ip"}  # headers of proxies, whose clients may be anywhere
_AT_ONCE = 16  # calls that run; further ones are refused


class McpTools:
    """Three endpoints for the page that this server serves, since a tool may do anything on this machine: not for pages
    of other origins, even with --cors-origin, and without an API key only for browsers on this machine."""

    def __init__(self, config: ServerConfig, servers: McpServers | None) -> None:
        self._config = config
        self._sessions = {} if servers is None else servers.sessions
        self._running = 0

    def routes(self) -> list[Route]:
        return [
            Route("/mcp/servers", self.servers),
            Route("/mcp/connect", self.connect, methods=["POST"]),
            Route("/mcp/call", self.call, methods=["POST"]),
        ]

    async def servers(self, request: Request) -> Response:
        """{"servers": [{"name", "state", "trouble", "tools"}]}; none for clients who may not use them."""
        sessions = self._sessions.values() if self._refusal(request) is None else ()
        return JSONResponse({"servers": [_session_json(session) for session in sessions]})

    async def connect(self, request: Request) -> Response:
        """{"server": NAME} → the server, once it is ready or has failed. Raises ApiError or BadRequest."""
        session = self._session(await self._body(request))
        await while_connected(request.receive, asyncio.gather(session.connect(), return_exceptions=True))
        return JSONResponse(_session_json(session))

    async def call(self, request: Request) -> Response:
        """{"server", "tool", "arguments"} → {"text", "is_error"}. A client that disconnects cancels it."""
        body = await self._body(request)
        session = self._session(body)
        tool, arguments = text("tool", body.get("tool", "")), mapping("arguments", body.get("arguments", {}))
        if session.state == READY and not any(tool == listed_tool.name for listed_tool in session.tools):
            raise BadRequest("tool", f"{session.name} has no tool called {tool[:100]}")
        if self._running == _AT_ONCE:
            raise ApiError(429, f"{_AT_ONCE} calls of tools are under way: try again when one has ended", "busy")
        self._running += 1
        try:
            work = session.call(tool, arguments, self._config.request_seconds)
            return JSONResponse(await while_connected(request.receive, work))
        except McpError as error:
            raise ApiError(502, str(error), "mcp") from None
        finally:
            self._running -= 1

    async def _body(self, request: Request) -> dict[str, Any]:
        if refusal := self._refusal(request):
            raise refusal
        return await read_body(request, self._config.max_body)

    def _session(self, body: dict[str, Any]) -> Session:
        name = text("server", body.get("server", ""))
        if name not in self._sessions:
            raise BadRequest("server", f"there is no MCP server called {name[:100]} here")
        return self._sessions[name]

    def _refusal(self, request: Request) -> ApiError | None:
        """Why the client may not use these endpoints; None if it may."""
        if not self._sessions:
            return ApiError(501, "This server has no MCP servers: start it with --mcp-config", "not_supported")
        if not _is_own(request):
            return ApiError(403, "Pages of other origins cannot use MCP servers", "not_allowed", "Origin")
        is_forwarded = bool(_FORWARDED & set(request.headers.keys()))
        if not self._config.keys.are_required and (is_forwarded or not is_here(request.client)):
            sentence = "MCP servers are for this machine's browsers alone: start this server with an API key"
            return ApiError(403, sentence, "not_allowed")
        return None


def _is_own(request: Request) -> bool:
    """Whether no page of another origin sends a request.

    Browsers say it in Sec-Fetch-Site where the connection is safe (HTTPS, or this machine), and name the page's origin
    in Origin, whose host then equals Host. No script can change either. Other programs send neither.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site in ("same-origin", "none")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _session_json(session: Session) -> dict[str, Any]:
    tools = [{"name": tool.name, "function": tool.function, "trouble": tool.trouble} for tool in session.tools]
    return {"name": session.name, "state": session.state, "trouble": session.trouble, "tools": tools}
