"""A contestant in its own process, so that a crash does not end the measurement, and its memory can be read.

Parent and child exchange lines of JSON on the child's standard input and output: a call is [name, arguments], an answer
is {"result": …} or {"failure": sentence}. The child may run another Python, so this file and `polarlm.children` import
only the standard library.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import polarlm
from polarlm import children

_ROOT = Path(polarlm.__file__).resolve().parents[1]  # the folder of the package
# The child imports this `polarlm`, but everything else from its own interpreter: next to an installed package there are
# others, which may be for another version of Python.
_START = """
import runpy, sys
module, root = sys.argv[1:]
sys.path.insert(0, root)
import polarlm
sys.path.append(sys.path.pop(0))
del sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
# Python keeps the bytecode of what it imports, as it does for users; pip has written the bytecode of packages.
_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
_LAST_SECONDS = 10.0  # seconds for the process to end


class Failed(Exception):
    """A contestant cannot continue. The message is the reason, in a few words for a table."""


class OutOfTime(Failed):
    """A contestant was ended, since the time of the measurement is over."""

    def __init__(self) -> None:
        super().__init__("its time was over")


class Child:
    """A process that runs the module `module`, which calls `serve`."""

    def __init__(
        self,
        module: str,
        python: str = sys.executable,
        end: float = math.inf,
    ) -> None:
        """end: when calls have to be answered, by `time.monotonic`. Raises Failed if it cannot be started."""
        self._until = end
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()  # None when the process has ended
        try:
            self._process = children.Child(
                [python, "-c", _START, module, str(_ROOT)],
                self._answers.put,
                lambda code: self._answers.put(None),
                errors=self._errors,
                environment={**os.environ, **_BYTECODE},
            )
        except OSError as error:
            self._errors.close()
            raise Failed(f"{python} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of the contestant's method `name`. Raises Failed, also if the process has ended, and OutOfTime."""
        self._process.tell([name, arguments])
        left = self._until - time.monotonic()
        try:
            answer = self._answers.get(timeout=None if left == math.inf else max(0.0, left))
        except Empty:
            raise OutOfTime from None
        if answer is None:
            self._answers.put(None)  # for further calls
            raise Failed(self._end())
        if "failure" in answer:
            raise Failed(answer["failure"])
        return answer["result"]

    def _end(self) -> str:
        """How the process ended, with the last line that it wrote to standard error."""
        end = children.how_ended(self._process.wait())
        self._errors.seek(0)
        lines = self._errors.read().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{end}: {last}" if last else end

    def close(self) -> None:
        """End the process, and a program that it runs."""
        self._process.end(_LAST_SECONDS)
        self._errors.close()


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
    fields = {name: re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE) for name, key in names.items()}
    return {name: 1024 * int(match[1]) for name, match in fields.items() if match}


def serve(start: Callable[..., Any], failures: Sequence[type[Exception]]) -> None:
    """Answer the parent's calls. The process exits when the parent closes its end of the pipe or exits.

    start: makes the contestant from the arguments of the call "start". failures: exceptions whose message is a
    sentence; for others, the answer also names the type.
    """
    calls: SimpleQueue[tuple[str, list[Any]]] = SimpleQueue()
    # The process ends also during a call, whose answer nobody reads any more.
    parent = children.Parent(calls.put, lambda: os._exit(0))
    contestant: Any = None
    while True:
        name, arguments = calls.get()
        answer: dict[str, Any]
        try:
            if name == "start":
                contestant, result = start(*arguments), None
            else:
                result = getattr(contestant, name)(*arguments)
            answer = {"result": result}
        except Exception as error:
            sentence = str(error) if isinstance(error, tuple(failures)) else f"{type(error).__name__}: {error}"
            answer = {"failure": sentence}
        parent.tell(answer)
