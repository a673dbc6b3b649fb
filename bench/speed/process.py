"""The memory of a process as the operating system reports it."""

from __future__ import annotations

import re
from pathlib import Path


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process's memory: "now", and on Linux also the "peak", and the "private" and "file" parts of "now".

    Pages of mapped files that have been touched count in "now", "peak" and "file".
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux
        import psutil

        return {"now": int(psutil.Process(pid).memory_info().rss)}
    names = {"peak": "VmHWM", "now": "VmRSS", "private": "RssAnon", "file": "RssFile"}
    found = {name: re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE) for name, key in names.items()}
    return {name: 1024 * int(match[1]) for name, match in found.items() if match}
