"""A program that is an MCP server, and whose tools are as tools should not be: `python faulty.py [http]`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("faulty")


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Raises."""
    raise ValueError("the tool is broken")


@server.tool()
def picture() -> Any:
    """A picture."""
    return ["Look:", Image(data=b"\0" * 30_000, format="png")]


@server.tool()
def environment() -> str:
    """The names of its environment variables."""
    return " ".join(sorted(os.environ))


@server.tool()
def crash() -> str:
    """Ends the program."""
    print("Traceback: out of luck", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def pid() -> str:
    return str(os.getpid())


@server.tool()
def leave() -> str:
    """The number of a process that it has started, in a session of its own."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    return str(subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL).pid)


@server.tool()
def long(bytes: int) -> str:
    """So many characters."""
    return "a" * bytes


@server.tool()
def flood() -> str:
    """Writes 100 MB without the end of a line."""
    piece = b"a" * (1 << 20)
    for _ in range(100):
        os.write(OUT, piece)
    return "done"


@server.tool()
def chatter() -> str:
    """Writes messages without end."""
    while True:
        os.write(OUT, MESSAGE)


@server.tool()
def garbage() -> str:
    """Writes what is neither JSON nor UTF-8, and then answers."""
    os.write(OUT, b"\xff\xfe{{{\n[1, 2]\n")
    return "after garbage"


@server.tool()
async def hang(begun: str, ended: str) -> str:
    """Waits for ever; writes files when it begins and when it is cancelled."""
    import anyio

    Path(begun).touch()
    try:
        await anyio.sleep_forever()
    finally:
        Path(ended).touch()
    return ""


OUT = os.dup(1)  # the server lets nothing else be printed there
MESSAGE = b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}\n'

if __name__ == "__main__":
    if "deaf" in sys.argv:  # says nothing, and does not end when it is asked to
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(sys.argv[-1]).write_text(str(os.getpid()))
        threading.Event().wait()
    if "http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    server.run()
