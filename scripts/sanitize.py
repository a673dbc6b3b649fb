"""A small pass of models under NVIDIA's compute-sanitizer, which finds accesses out of bounds and races on a GPU."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence

from scripts.processes import find, run_for

TOOLS = ("memcheck", "racecheck")
_PROGRAM = "compute-sanitizer"
_FOUND = 9  # exit code if it finds something
_SHOWN = 20  # lines of output after a failure


def sanitize(seconds: float, tools: Sequence[str] = TOOLS) -> Iterator[tuple[str, str, str]]:
    """For each tool: its name; "passed", "failed" or "skipped"; and why. seconds: of each, at most."""
    program = find(_PROGRAM)
    for tool in tools:
        if program is None:
            yield tool, "skipped", f"{_PROGRAM} is not installed"
            continue
        yield tool, *_run(program, tool, seconds)


def _run(program: str, tool: str, seconds: float) -> tuple[str, str]:
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), sys.executable, "-m", "tests.cuda.small_pass"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        code = run_for(seconds, command, output)
        output.seek(0)
        end = "\n".join(output.read().strip().splitlines()[-_SHOWN:])
    if code is None:
        return "skipped", f"not finished after {seconds:.0f} s; {end}"
    return ("passed", "") if code == 0 else ("failed", end)
