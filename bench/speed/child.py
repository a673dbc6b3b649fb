"""A contestant in its own process, so that a crash does not end the measurement, and its memory can be read.

Parent and child exchange lines of JSON on the child's standard input and output: a call is [name, arguments], an answer
is {"result": …} or {"failure": sentence}. This file imports only the standard library: the child may run another
Python.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import polarlm

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
# Python keeps the bytecode of what it imports, as it does for users; pip has written that of installed packages.
_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
_LAST_SECONDS = 10.0  # seconds for the process to end


class Failed(Exception):
    """A contestant cannot continue. The message is the reason, in a few words for a table."""


class Child:
    """A process that runs the module `module`, which calls `serve`."""

    def __init__(self, module: str, python: str = sys.executable, variables: Mapping[str, str] | None = None) -> None:
        """python: the interpreter. variables: further ones of its environment. Raises Failed if it cannot be
        started."""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [python, "-c", _START, module, str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                env={**os.environ, **_BYTECODE, **(variables or {})},
                start_new_session=True,  # Ctrl-C reaches only the parent, which ends the child
            )
        except OSError as error:
            self._errors.close()
            raise Failed(f"{python} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """The process id."""
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
        """How the process ended, with the last line that it wrote to standard error."""
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
            self._process.wait(_LAST_SECONDS)  # it exits when its input ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(self._process.pid, signal.SIGKILL)  # a program that it runs
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
    found = {name: re.search(rf"^{key}:\s*(\d+) kB", status, re.MULTILINE) for name, key in names.items()}
    return {name: 1024 * int(match[1]) for name, match in found.items() if match}


def serve(start: Callable[..., Any], failures: Sequence[type[Exception]]) -> None:
    """Answer the parent's calls. The process exits when the parent closes its end of the pipe or exits.

    start: makes the contestant from the arguments of the call "start". Before it, "imported" is answered. failures:
    exceptions whose message is a sentence; for others, the answer also names the type.
    """
    calls, answers = _pipes()
    contestant: Any = None
    while True:
        name, arguments = json.loads(calls.get())
        answer: dict[str, Any]
        try:
            if name == "imported":
                result = None
            elif name == "start":
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
    """A queue of calls and a file for answers. From now on, libraries that print to standard output print to standard
    error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            calls.put(line)
        os._exit(0)  # also during a call, whose answer nobody reads any more

    threading.Thread(target=read, daemon=True).start()
    return calls, answers
