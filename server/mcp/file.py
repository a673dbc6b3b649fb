"""The file of --mcp-config: which MCP servers there are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polarlm.engine import EngineError

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
    enabled = []
    for name, entry in servers.items():
        try:
            enabled += [] if isinstance(entry, dict) and entry.get("disabled") is True else [_server(name, entry)]
        except ValueError as error:
            raise EngineError(f"--mcp-config {path}: the server {name!r} {error}", "mcp") from None
    return enabled


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
