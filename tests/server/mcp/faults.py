"""Files of --mcp-config with the servers of `faulty.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port
from tests.server.lines import PATIENCE

FAULTY = Path(__file__).with_name("faulty.py")
TOKEN = "sk-very-secret"


def mcp_file(folder: Path, web: int = 9) -> Path:
    """The path of a file that names servers of all kinds. web: the port of one over HTTP."""
    servers = {
        "tools": {"command": sys.executable, "args": [str(FAULTY)], "env": {"TOKEN": TOKEN}},
        "web": {"type": "http", "url": f"http://127.0.0.1:{web}/mcp", "headers": {"Authorization": f"Bearer {TOKEN}"}},
        "absent": {"command": str(folder / "no-such-program")},
        "broken": {"command": sys.executable, "args": ["-c", "import os; raise SystemExit(os.environ['TOKEN'])"]},
        "deaf": {"command": sys.executable, "args": [str(FAULTY), "deaf", str(folder / "deaf")]},
        "off": {"command": "anything", "disabled": True},
    }
    servers["broken"]["env"] = {"TOKEN": TOKEN}
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


@contextmanager
def over_http() -> Iterator[int]:
    """Runs the server over HTTP; gives the port."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, str(FAULTY), "http", str(port)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            assert any("running on" in line for line in process.stderr)
            yield port
        finally:
            process.kill()
            process.communicate(timeout=PATIENCE)
