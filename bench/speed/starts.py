"""Starts: a new process that loads the model and computes the first token of a short prompt."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarlm.bench.result import Result
from polarlm.bench.speed.child import memory
from polarlm.bench.speed.contestants import Contestant, Subject, new_child, start
from polarlm.engine.backends.numpy import host_memory

START, FIRST = "start", "the first start ever"
START_TOKENS = 8  # tokens of the prompt of a start
_KERNELS = "kernels"  # the folder of the user's cache folder that has compiled kernels
_WRITE = "import sys, numpy; numpy.ones(int(sys.argv[1]), numpy.uint8)"  # in huge pages
_MIB, _GIB = 1 << 20, 1 << 30
WITH_EMPTY_FOLDER = 10  # `Starter.add_first_ever` takes about as long as this number of other starts


@dataclass(frozen=True)
class Starter:
    """Starts contestants with `context` tokens of context; `ids` are the prompt."""

    subject: Subject
    threads: int
    context: int
    ids: Sequence[int]

    def run(self, contestant: Contestant, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The "seconds" to a new process's first token, their "parts" and its "memory"; of our engine also the compiled
        "kernels" and their "compiling" seconds. variables: of its environment. Raises Failed."""
        ready_memory(memory_of_a_start(self.subject.file_bytes))
        began = time.perf_counter()
        with closing(new_child(contestant, self.subject, variables)) as child:
            if contestant.is_program:
                start(child, contestant, self.subject, self.threads, self.context)
                return {"parts": {}, **child.call("first_token", self.ids)}
            child.call("imported")
            imported = time.perf_counter()
            start(child, contestant, self.subject, self.threads, self.context)
            loaded = time.perf_counter()
            child.call("prompt_rate", self.ids)
            ended = time.perf_counter()
            sizes, compiled = memory(child.pid), {}
            if contestant.is_ours:
                sizes |= child.call("resident")
                if "peak" in sizes and self.subject.device == "cpu":
                    sizes["rest"] = sizes["peak"] - sizes["weights"] - sizes["store"]
                compiled = dict(zip(("kernels", "compiling"), child.call("compiled"), strict=True))
        parts = {"imports": imported - began, "loading": loaded - imported, "first token": ended - loaded}
        return {"seconds": ended - began, "parts": parts, "memory": sizes, **compiled}

    def add_first_ever(self, result: Result, contestant: Contestant, warm: float) -> None:
        """Add the first start, with an empty cache folder: its seconds, the fit of the cache among them, its compiled
        kernels and their compiling seconds.

        warm: seconds of a start that finds fit and kernels. Raises Failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            variables = {"POLARLM_CACHE": folder}
            first = self.run(contestant, variables)
            for path in Path(folder).iterdir():
                if path.name != _KERNELS:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            fitted = self.run(contestant, variables)["seconds"]
        fit = max(0.0, min(fitted, first["seconds"]) - warm)  # the machine may slow one of the two down
        figures = {name: first[name] for name in ("seconds", "kernels", "compiling")}
        result.add_all(FIRST, str(contestant), figures | {"fit": fit})


def memory_of_a_start(file_bytes: int) -> int:
    """Return the bytes of memory that a start may need, as far as they are free besides the model's file in memory."""
    return max(0, min(file_bytes * 3 // 2 + 512 * _MIB, host_memory.available() - file_bytes - _GIB))


def ready_memory(size: int) -> None:
    """Let another process write `size` bytes of memory, and end.

    The host of a virtual machine may take back memory that has been free for seconds; the next process waits for it.
    """
    if size:
        subprocess.run([sys.executable, "-c", _WRITE, str(size)], check=False, stderr=subprocess.DEVNULL)


def add_medians(
    result: Result, subject: str, contestant: str, starts: Sequence[Mapping[str, Any]], **more: Any
) -> None:
    """Add the seconds of starts, the medians of their parts, and the most memory."""
    result.add(subject, contestant, "seconds", [start["seconds"] for start in starts], **more)
    parts = {name: statistics.median(start["parts"][name] for start in starts) for name in starts[0]["parts"]}
    sizes = {name: max(start["memory"][name] for start in starts) for name in starts[0]["memory"]}
    result.add_all(subject, contestant, parts | sizes)
