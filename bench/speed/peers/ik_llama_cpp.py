"""ik_llama.cpp for comparison: its `llama-bench`, built by the user, is run once for every figure.

The program takes numbers of tokens, not tokens: its prompts are random, and what is before its steps is computed again
in every run. Nothing is sampled and no text is made, which favours the peer.

Without AVX-512's F, BW, DQ, VL and VNNI all in its build it falls back to AVX2 kernels. It says so when it loads a
model, and the version here says what it says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polarlm.bench.speed.child import serve
from polarlm.bench.speed.peers import NoPeer

NAME, LABEL, PROGRAM = "ik_llama.cpp", "ik_llama.cpp", "llama-bench"
CACHES = {"f16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
NOTES = (
    "ik_llama.cpp is measured by its own llama-bench: a process for every figure, whose memory is known by its peak "
    "alone, and whose start has no parts",
)
_FLAGS = ("-fa", "1", "-rtr", "1")  # flash attention, which quantized caches need; weights repacked while they load
_KERNELS = {"HAVE_FANCY_SIMD is defined": "AVX-512 kernels", "HAVE_FANCY_SIMD is NOT defined": "AVX2 kernels"}


class Program:
    """Runs of `llama-bench` with a model, a number of threads and a cache."""

    def __init__(self, path: str, context: int, threads: int, cache: str, program: str) -> None:
        """context: not needed, since each run makes room for its own tokens."""
        self._command = [program, "-m", path, "-t", str(threads), "-ctk", cache, "-ctv", cache, *_FLAGS, "-o", "json"]
        self._peak = 0

    def about(self) -> dict[str, str]:
        """The commit that the program was built from, its kernels, and the flags that it is run with."""
        (measured,), said, _ = self._run("-p", "1", "-n", "0", "-r", "1", "-w", "0", "-v")
        kernels = next((name for line, name in _KERNELS.items() if line in said), "kernels of unknown instructions")
        version = f"{measured['build_commit']} (build {measured['build_number']})"
        return {"version": version, "built_with": f"{kernels}; {' '.join(_FLAGS)}"}

    def prompt_rate(self, ids: Sequence[int]) -> float:
        """Tokens per second of a prompt of as many tokens, the second of a process."""
        (measured,), _, _ = self._run("-p", str(len(ids)), "-n", "0", "-r", "2")
        return float(measured["samples_ts"][-1])

    def generation_rate(self, ids: Sequence[int], following: Sequence[int]) -> float:
        """Steps per second after as many tokens."""
        (measured,), _, _ = self._run("-p", "0", "-n", "0", "-gp", f"{len(ids) + 1},{len(following) - 1}", "-r", "1")
        return float(measured["samples_ts"][-1])

    def memory(self) -> dict[str, int]:
        """The most memory that a run has needed."""
        return {"peak": self._peak} if self._peak else {}

    def first_token(self, ids: Sequence[int]) -> dict[str, Any]:
        """The seconds from the start of the program to the end of a prompt of as many tokens, and the memory."""
        self._peak = 0
        _, _, seconds = self._run("-p", str(len(ids)), "-n", "0", "-r", "1", "-w", "0")
        return {"seconds": seconds, "memory": self.memory()}

    def _run(self, *flags: str) -> tuple[list[dict[str, Any]], str, float]:
        """What the program measures, what it says, and the seconds until it has written that. Raises NoPeer."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            began = time.perf_counter()
            try:
                process = subprocess.Popen(
                    [*self._command, *flags], stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
                )
            except OSError as error:
                raise NoPeer(f"{self._command[0]} cannot be started: {error.strerror}") from None
            assert process.stdout is not None
            with process.stdout as output:
                lines, ended = [], began
                for line in output:
                    lines.append(line)
                    if line.strip().startswith("}"):  # the figures are out; what follows frees memory
                        ended = time.perf_counter()
            status, used = _end(process)
            errors.seek(0)
            said = errors.read()
        if status:
            last = next((line.strip() for line in reversed(said.split("\n")) if line.strip()), "")
            raise NoPeer(f"{PROGRAM} ended with exit code {status}: {last}")
        self._peak = max(self._peak, used)
        return _figures("".join(lines)), said, ended - began


def _end(process: subprocess.Popen[str]) -> tuple[int, int]:
    """The exit status of a process, and the most bytes that it has had in memory; 0 where the system does not say."""
    if not hasattr(os, "wait4"):
        return process.wait(), 0
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    kib = 1 if os.uname().sysname == "Darwin" else 1024
    return process.returncode, used.ru_maxrss * kib


def _figures(printed: str) -> list[dict[str, Any]]:
    array = re.search(r"\[.*\]", printed, re.DOTALL)
    try:
        figures = json.loads(array[0]) if array else []
    except json.JSONDecodeError:
        figures = []
    if len(figures) != 1:
        raise NoPeer(f"{PROGRAM} has printed no figures")
    return list(figures)


def start(path: str, context: int, threads: int, cache: str, program: str) -> Program:
    """A program that exists. Raises NoPeer."""
    if os.sep in program and not Path(program).is_file():
        raise NoPeer(f"{program} does not exist")
    return Program(path, context, threads, cache, program)


if __name__ == "__main__":
    serve(start, [NoPeer])
