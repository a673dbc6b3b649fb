"""A small pass of models under NVIDIA's compute-sanitizer, which finds accesses out of bounds and races on a GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
_PROGRAM = "compute-sanitizer"
_FOUND = 9  # exit code if it finds something
_SHOWN = 20  # lines of output after a failure


def find() -> str | None:
    """The path of compute-sanitizer."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    places = [str(Path(folder) / part) for folder in folders if folder for part in ("bin", "compute-sanitizer")]
    return shutil.which(_PROGRAM) or shutil.which(_PROGRAM, path=os.pathsep.join(places))


def sanitize(seconds: float) -> Iterator[tuple[str, str, str]]:
    """For each tool: its name; "passed", "failed" or "skipped"; and why. seconds: of each, at most."""
    program = find()
    for tool in TOOLS:
        if program is None:
            yield tool, "skipped", f"{_PROGRAM} is not installed"
            continue
        yield tool, *_run(program, tool, seconds)


def _run(program: str, tool: str, seconds: float) -> tuple[str, str]:
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), sys.executable, "-m", "tests.cuda.small_pass"]
    # A session of its own, so that its end is the end of the program under test as well.
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        output, _ = running.communicate()
        return "skipped", f"not finished after {seconds:.0f} s; {_end(output)}"
    if running.returncode == 0:
        return "passed", ""
    return "failed", _end(output)


def _end(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-_SHOWN:])
