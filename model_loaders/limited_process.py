"""Runs work on data that can be hostile, from a model or a client, in a process with limits of time and memory.

The process runs one file, which reads lines of JSON and answers each except the first with one line. It limits its own
memory, and its processor time for each line (`children.answer_lines`).
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from polarlm.children import OUT_OF_MEMORY, Child, how_ended, python
from polarlm.model_loaders.forks import renew_in_children

TOO_LONG = -getattr(signal, "SIGPROF", 0)  # exit code of a process at the end of its processor time

# The worker's own limit counts processor time. These count seconds, for systems without that limit; they are generous,
# since the worker may have to wait on a busy machine.
_START_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 0.05  # between two checks whether the answer is still wanted


class ProcessFailed(Exception):
    """A worker gave no answer. The message says why, without naming the request."""


class LimitedProcess:
    """A worker process, started at the first request and ended with this object. Threads may share it."""

    def __init__(self, worker: Path, first: object) -> None:
        """worker: the file that it runs. first: its first line, which must be JSON."""
        self._file, self._first = worker, first
        self._lock = threading.Lock()
        self._worker: Child | None = None
        renew_in_children(self)

    def ask(self, request: object, gone: Callable[[], bool] = lambda: False) -> Any:
        """The answer to a request, which must be JSON. Raises ProcessFailed if a limit ends the process.

        gone: returns True once nobody wants the answer; the process is then ended as well.
        """
        with self._lock:
            if self._worker is not None and self._worker.poll() is not None:  # it was killed while idle
                self._stop()
            if self._worker is None:
                self._start()
                return self._ask([self._first, request], _START_SECONDS, gone)
            return self._ask([request], _ANSWER_SECONDS, gone)

    def close(self) -> None:
        """End the worker after its current request; a later request starts another worker."""
        with self._lock:
            if self._worker is not None:
                self._stop()

    def renew(self) -> None:
        """Forget the parent's worker and its pipes in a forked child, which starts a worker of its own."""
        self._lock = threading.Lock()
        if self._worker is not None:
            self._end.detach()
            self._worker.forget()
            self._worker = None

    def _start(self) -> None:
        # True with an answer, or False with the exit code.
        self._heard: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        heard = self._heard
        try:
            self._worker = Child(
                python(str(self._file)),
                lambda answer: heard.put((True, answer)),
                lambda code: heard.put((False, code)),
                errors=subprocess.DEVNULL,
            )
        except (OSError, ValueError, TypeError) as error:  # TypeError: a program without an interpreter's path
            reason = error.strerror if isinstance(error, OSError) else error  # without the interpreter's path
            raise ProcessFailed(f"no process could be started for it ({reason})") from error
        self._end = weakref.finalize(self, self._worker.end)

    def _stop(self) -> None:
        self._end()
        self._worker = None

    def _ask(self, requests: list[object], seconds: float, gone: Callable[[], bool]) -> Any:
        """The answer to the last of `requests`; a worker that sends none is ended."""
        assert self._worker is not None
        deadline = time.monotonic() + seconds
        try:
            self._worker.tell(*requests)
            has_answered, answer = self._wait(deadline, gone)
        except BaseException:  # Ctrl-C: the next request must not read this one's answer
            self._stop()
            raise
        if has_answered:
            return answer
        self._stop()
        raise ProcessFailed(why_ended(answer))

    def _wait(self, deadline: float, gone: Callable[[], bool]) -> tuple[bool, Any]:
        """What the worker's thread puts into the queue next. Raises ProcessFailed at the deadline, or if `gone`."""
        while True:
            try:
                return self._heard.get(timeout=_LOOK_SECONDS)
            except Empty:
                if gone() or time.monotonic() > deadline:
                    raise ProcessFailed("it needs too much time") from None


def why_ended(code: int) -> str:
    """The reason why a process with limits ended with an exit code other than 0; negative codes are signals."""
    if code in (OUT_OF_MEMORY, -getattr(signal, "SIGABRT", 0)):  # Rust aborts if it gets no memory
        return "it needs too much memory"
    if code in (-getattr(signal, "SIGSEGV", 0), -getattr(signal, "SIGBUS", 0)):  # a stack overflow
        return "it is nested too deeply"
    if code == TOO_LONG:
        return "it needs too much time"
    return f"its process {how_ended(code)}"
