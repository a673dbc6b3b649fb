"""Runs a program for a limited time, and finds NVIDIA's tools."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_INSTALLED = ("/usr/local/cuda", *sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*")), reverse=True))


def find(program: str) -> str | None:
    """The path of a program of the CUDA toolkit, such as compute-sanitizer or ncu."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), *_INSTALLED]
    places = [str(Path(folder) / part) for folder in folders if folder for part in ("", "bin", program)]
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(places))


def run_for(
    seconds: float,
    command: Sequence[str],
    output: IO[str],
    errors: IO[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """The exit code of a command whose output goes to a file; None if it was ended after so many seconds.

    errors: the file of its standard error; default: `output`. environment: variables besides those of this process.
    Its end, and that of the caller by Ctrl-C, is the end of the processes that it has begun, too.
    """
    to = output, errors or subprocess.STDOUT
    running = subprocess.Popen(
        command, stdout=to[0], stderr=to[1], env={**os.environ, **(environment or {})}, start_new_session=True
    )
    try:
        return running.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
