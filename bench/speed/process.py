"""The memory of a process, as the operating system counts it."""

from __future__ import annotations

import re
from pathlib import Path


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process's memory: "now", and on Linux its "peak", and of now what is "private" and what is "file".

    Pages of mapped files count as far as they have been touched, in "now", in "peak" and in "file".
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:  # no Linux
        import psutil

        return {"now": int(psutil.Process(pid).memory_info().rss)}
    names = {"peak": "VmHWM", "now": "VmRSS", "private": "RssAnon", "file": "RssFile"}
    found = {name: re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE) for name, key in names.items()}
    return {name: 1024 * int(match[1]) for name, match in found.items() if match}
