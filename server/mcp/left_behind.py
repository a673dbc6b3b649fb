"""Processes that an MCP server has started and left behind, also in sessions of their own: they end with its client."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

import psutil

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_ROUNDS, _ROUND_SECONDS = 20, 0.1  # rounds of killing, since a process may start others meanwhile


def adopt() -> None:
    """Become the parent of what the server starts and leaves behind, where the system can do that: on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def bury(programs: set[int] | None) -> None:
    """Take the exit status of an adopted process that has ended. programs: the transport takes theirs."""
    if sys.platform != "linux" or programs is None:
        return
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid not in programs:
            os.waitpid(ended.si_pid, os.WNOHANG)


def end() -> None:
    """End all that the server has started and that is left."""
    for _ in range(_ROUNDS):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_ROUND_SECONDS)
