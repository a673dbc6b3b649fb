"""Runs work on data that can be hostile, from a model or a client, in a process with limits of time and memory.

The process runs one file, which reads lines of JSON and answers each except the first with one line. It limits its own
memory, and its processor time for each line (`children.answer_lines`). Requests take turns, in the order in which they
arrive, and a request that nobody waits for any more (`wanted_until`) leaves its place, or ends the process that works
on it.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


_GONE: ContextVar[Callable[[], bool]] = ContextVar("gone", default=lambda: False)


class ProcessFailed(Exception):
    """A worker gave no answer. The message says why, without naming the request."""


class TookTooLong(ProcessFailed):
    """A worker ran into its limit of time."""

    def __init__(self) -> None:
        super().__init__("it needs too much time")


class NobodyWaits(Exception):
    """The answer of a worker is not wanted any more."""


@contextmanager
def wanted_until(gone: Callable[[], bool]) -> Iterator[None]:
    """What this thread asks of workers inside is wanted until `gone` returns True; then NobodyWaits is raised."""
    token = _GONE.set(gone)
    try:
        yield
    finally:
        _GONE.reset(token)


class LimitedProcess:
    """A worker process, started at the first request and ended with this object. Threads may share it."""

    def __init__(self, worker: Path, first: object) -> None:
        """worker: the file that it runs. first: its first line, which must be JSON."""
        self._file, self._first = worker, first
        self._worker: Child | None = None
        self._new_line()
        renew_in_children(self)

    def ask(self, request: object) -> Any:
        """The answer to a request, which must be JSON. Raises ProcessFailed if a limit ends the process, and
        NobodyWaits."""
        with self._turn(_GONE.get()):
            if self._worker is not None and self._worker.poll() is not None:  # it was killed while idle
                self._stop()
            if self._worker is None:
                self._start()
                return self._ask([self._first, request], _START_SECONDS)
            return self._ask([request], _ANSWER_SECONDS)

    def close(self) -> None:
        """End the worker after its current request; a later request starts another worker."""
        with self._turn(lambda: False, next=True):
            if self._worker is not None:
                self._stop()

    def renew(self) -> None:
        """Forget the parent's worker and its pipes in a forked child, which starts a worker of its own."""
        self._new_line()
        if self._worker is not None:
            self._end.detach()
            self._worker.forget()
            self._worker = None

    def _new_line(self) -> None:
        self._condition = threading.Condition()
        self._line: deque[object] = deque()  # a ticket for each waiting thread; the first one has its turn

    @contextmanager
    def _turn(self, gone: Callable[[], bool], *, next: bool = False) -> Iterator[None]:
        """Wait in the queue, and hold its first place. next: enter second, and not at the end. Raises NobodyWaits."""
        place = object()
        with self._condition:
            self._line.insert(1 if next else len(self._line), place)
        try:
            with self._condition:
                while self._line[0] is not place:
                    self._condition.wait(_LOOK_SECONDS)
                    if gone():
                        raise NobodyWaits
            yield
        finally:
            with self._condition:
                self._line.remove(place)
                self._condition.notify_all()

    def _start(self) -> None:
        # True with an answer, or False with the exit code.
        self._answers: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        answers = self._answers
        try:
            self._worker = Child(
                python(str(self._file)),
                lambda answer: answers.put((True, answer)),
                lambda code: answers.put((False, code)),
                errors=subprocess.DEVNULL,
            )
        except (OSError, ValueError, TypeError) as error:  # TypeError: a program without an interpreter's path
            reason = error.strerror if isinstance(error, OSError) else error  # without the interpreter's path
            raise ProcessFailed(f"no process could be started for it ({reason})") from error
        self._end = weakref.finalize(self, self._worker.end)

    def _stop(self) -> None:
        self._end()
        self._worker = None

    def _ask(self, requests: list[object], seconds: float) -> Any:
        """The answer to the last of `requests`; a worker that sends none is ended."""
        assert self._worker is not None
        deadline = time.monotonic() + seconds
        try:
            self._worker.tell(*requests)
            has_answered, answer = self._wait(deadline, _GONE.get())
        except BaseException:  # Ctrl-C: the next request must not read this one's answer
            self._stop()
            raise
        if has_answered:
            return answer
        self._stop()
        raise TookTooLong if answer == TOO_LONG else ProcessFailed(why_ended(answer))

    def _wait(self, deadline: float, gone: Callable[[], bool]) -> tuple[bool, Any]:
        """What the worker's thread puts into the queue next. Raises TookTooLong at the deadline, or NobodyWaits."""
        while True:
            try:
                return self._answers.get(timeout=_LOOK_SECONDS)
            except Empty:
                if gone():
                    raise NobodyWaits from None
                if time.monotonic() > deadline:
                    raise TookTooLong from None


def why_ended(code: int) -> str:
    """The reason why a process with limits ended with an exit code other than 0; negative codes are signals."""
    if code in (OUT_OF_MEMORY, -getattr(signal, "SIGABRT", 0)):  # Rust aborts if it gets no memory
        return "it needs too much memory"
    if code in (-getattr(signal, "SIGSEGV", 0), -getattr(signal, "SIGBUS", 0)):  # a stack overflow
        return "it is nested too deeply"
    if code == TOO_LONG:
        return "it needs too much time"
    return f"its process {how_ended(code)}"
