"""A contestant in a process of its own, so that its crash is not the measurement's, and its memory can be read.

Parent and child exchange lines of JSON on the child's standard input and output: a call is [name, arguments], an answer
is {"result": …} or {"failure": sentence}. Needs nothing but the standard library: the child may be another Python.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import polarlm

_ROOT = Path(polarlm.__file__).resolve().parents[1]  # where the package is
# `polarlm` is this package, and everything else is the interpreter's own: beside an installed package lie others, which
# may be for another version of Python.
_START = """
import runpy, sys
module, root = sys.argv[1:]
sys.path.insert(0, root)
import polarlm
sys.path.append(sys.path.pop(0))
del sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_LAST_SECONDS = 10.0  # for the process to end


class Failed(Exception):
    """A contestant cannot continue. The message is the reason, in a few words for a table."""


class Child:
    """A process that runs the module `module`, which calls `serve`."""

    def __init__(self, module: str, python: str = sys.executable) -> None:
        """python: the interpreter. Raises Failed if it cannot be started."""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, "-c", _START, module, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the parent, which ends it
            )
        except OSError as error:
            self._errors.close()
            raise Failed(f"{python} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of the contestant's method `name`. Raises Failed, also if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Failed(self._end())
        found = json.loads(answer)
        if "failure" in found:
            raise Failed(found["failure"])
        return found["result"]

    def _end(self) -> str:
        """How the process ended, with the last line of what it wrote to standard error."""
        code = self._process.wait(_LAST_SECONDS)
        try:
            end = f"crashed ({signal.Signals(-code).name})"
        except ValueError:
            end = f"ended with exit code {code}"
        self._errors.seek(0)
        said = self._errors.read().split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        return f"{end}: {last}" if last else end

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                assert pipe is not None
                pipe.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(_LAST_SECONDS)  # its input has ended
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def serve(start: Callable[..., Any], failures: Sequence[type[Exception]]) -> None:
    """Answer the parent's calls. The process ends when the parent closes its end of the pipe, or has ended itself.

    start: makes the contestant, from the arguments of the first call, "start". failures: exceptions whose message is a
    sentence; of others, the type is named as well.
    """
    calls, answers = _pipes()
    contestant: Any = None
    while True:
        name, arguments = json.loads(calls.get())
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
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _pipes() -> tuple[queue.SimpleQueue[str], TextIO]:
    """The calls and the answers; what a library prints to standard output goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            calls.put(line)
        os._exit(0)  # also in the middle of a call, whose answer is not wanted any more

    threading.Thread(target=read, daemon=True).start()
    return calls, answers
