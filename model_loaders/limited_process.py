"""Runs work on data that can be hostile, from a model or a client, in a process with limits of time and memory.

The process runs one file, which reads lines of JSON and answers each except the first with one line. It limits its own
memory, and its processor time for each line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polarlm.model_loaders.child_python import python
from polarlm.model_loaders.forks import renew_in_children

OUT_OF_MEMORY = 3  # exit code of a worker
TOO_LONG = -getattr(signal, "SIGPROF", 0)  # exit code of a process at the end of its processor time

# The worker's own limit counts processor time. These count seconds, for systems without that limit; they are generous,
# since the worker may have to wait on a busy machine.
_START_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_EXIT_SECONDS = 5.0  # to wait for the end of a worker that has closed its pipe
_LOOK_SECONDS = 0.05  # between two checks whether the answer is still wanted


class ProcessFailed(Exception):
    """A worker gave no answer. The message says why, without naming the request."""


class LimitedProcess:
    """A worker process, started at the first request and ended with this object. Threads may share it."""

    def __init__(self, worker: Path, first: object) -> None:
        """worker: the file that it runs. first: its first line, which must be JSON."""
        self._file, self._first = worker, first
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
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
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._end.detach()
        worker.returncode = 0  # it is not this process's child
        nothing = os.open(os.devnull, os.O_RDWR)
        for pipe in (worker.stdin, worker.stdout):
            # Closing them would write, a second time, what another thread of the parent had buffered.
            if pipe is not None and not pipe.closed:
                os.dup2(nothing, pipe.fileno(), inheritable=False)
        os.close(nothing)

    def _start(self) -> None:
        try:
            worker = subprocess.Popen(
                python(str(self._file)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to this process alone
            )
        except (OSError, ValueError, TypeError) as error:  # TypeError: a program without an interpreter's path
            reason = error.strerror if isinstance(error, OSError) else error  # without the interpreter's path
            raise ProcessFailed(f"no process could be started for it ({reason})") from error
        self._end = weakref.finalize(self, _end, worker)
        self._worker = worker

    def _stop(self) -> None:
        self._end()
        self._worker = None

    def _ask(self, requests: Sequence[object], seconds: float, gone: Callable[[], bool]) -> Any:
        """The answer to the last of `requests`; a worker that sends none is ended."""
        worker = self._worker
        assert worker is not None
        assert worker.stdin is not None
        assert worker.stdout is not None
        answered, late, deadline = threading.Event(), threading.Event(), time.monotonic() + seconds

        def watch() -> None:
            while not answered.wait(_LOOK_SECONDS):
                if gone() or time.monotonic() > deadline:
                    late.set()
                    _kill(worker)
                    return

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            worker.stdin.write(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
            worker.stdin.flush()
            line = worker.stdout.readline()
        except OSError:
            line = b""
        except BaseException:  # Ctrl-C: the next request must not read this one's answer
            self._stop()
            raise
        finally:
            answered.set()
            watching.join()
        if not line.endswith(b"\n"):
            reason = "it needs too much time" if late.is_set() else _reason(worker)
            self._stop()
            raise ProcessFailed(reason)
        if late.is_set():
            self._stop()
        return json.loads(line)


def _reason(worker: subprocess.Popen[bytes]) -> str:
    """The reason why a worker that this process did not kill has closed its pipe."""
    try:
        return why_ended(worker.wait(_EXIT_SECONDS))
    except subprocess.TimeoutExpired:
        return "its process does not answer"


def why_ended(code: int) -> str:
    """The reason why a process with limits ended with an exit code other than 0; negative codes are signals."""
    if code in (OUT_OF_MEMORY, -getattr(signal, "SIGABRT", 0)):  # Rust aborts if it gets no memory
        return "it needs too much memory"
    if code in (-getattr(signal, "SIGSEGV", 0), -getattr(signal, "SIGBUS", 0)):  # a stack overflow
        return "it is nested too deeply"
    if code == TOO_LONG:
        return "it needs too much time"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
    return f"its process ended without an answer ({name})"


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """End a worker and the processes that it has started: it leads its process group."""
    if worker.returncode is not None:
        return
    if sys.platform == "win32":
        worker.kill()
        return
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except OSError:  # it has ended, or has not begun its group yet
        worker.kill()


def _end(worker: subprocess.Popen[bytes]) -> None:
    _kill(worker)
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unwritten data is lost
                continue
    worker.wait()
