"""All MCP servers of the file."""

from __future__ import annotations

import asyncio

from polarlm.server.config import ServerConfig
from polarlm.server.mcp.file import read_mcp_file
from polarlm.server.mcp.session import Session


class McpServers:
    """A session for each server; whoever makes it closes it, in the same event loop."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises EngineError if the file is wrong. Without --mcp-config there are none."""
        servers = [] if config.mcp_config is None else read_mcp_file(config.mcp_config)
        most = config.max_body // 4  # a conversation has others, too, and is sent as a whole
        self.sessions = {server.name: Session(server, most) for server in servers}

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self.sessions.values()))
