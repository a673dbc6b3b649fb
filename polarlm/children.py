"""The processes that this project starts: Python apart from the user's folder, and lines of JSON between two processes.

This module needs the standard library alone, since a child may run another Python than its parent. It stands in this
package, which every child has imported, and not in one of the rooms, which would be imported with it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

OUT_OF_MEMORY = 3  # exit code of a worker
_READ = 1 << 16  # bytes that are read at once
_START = (
    "import runpy, sys; run, end = sys.argv[1], 3 + int(sys.argv[2]); "
    "sys.path[:] = sys.argv[3:end]; del sys.argv[1:end]; "
    "(runpy.run_path if run.endswith('.py') else runpy.run_module)(run, run_name='__main__')"
)


def python(run: str, *arguments: str) -> list[str]:
    """The command of a child that runs a module by its full name, or a file, as `__main__`.

    The child has this process's path, but neither Python's environment variables nor the current folder, unless this
    project is imported from there: it may have been downloaded, or have a `types.py`, and Python would look there
    first.
    """
    ours = str(Path(sys.modules["polarlm"].__file__ or "").resolve().parents[1])
    entries = (entry for entry in sys.path if entry and isinstance(entry, str))  # as imports take them
    path = [entry for entry in entries if _is_same(entry, ours) or not _is_same(entry, os.curdir)]
    path[:0] = [] if any(_is_same(entry, ours) for entry in path) else [ours]
    options = ["-X", f"utf8={sys.flags.utf8_mode}", *(["-B"] if sys.flags.dont_write_bytecode else [])]
    return [sys.executable, "-I", *options, "-c", _START, run, str(len(path)), *path, *arguments]


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def how_ended(code: int) -> str:
    """How a process with this exit code ended, in words; negative codes are signals.

    >>> how_ended(3), how_ended(-9)
    ('ended with exit code 3', 'crashed (SIGKILL)')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    is_signal = -code in set(signal.Signals)
    return f"crashed ({signal.Signals(-code).name if is_signal else f'signal {-code}'})"


class Lines:
    """Splits a stream of bytes into lines of at most `limit` bytes; buffers one line at most."""

    def __init__(self, limit: float = math.inf) -> None:
        self._limit = limit
        self._pending = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """The lines that `data` completes, without line ends; None for a line as soon as it is too long."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            if self._outgrown(end):
                yield None
            if not self._skipping:
                yield bytes(self._pending)
            self._pending.clear()
            self._skipping = False
        if self._outgrown(rest):
            yield None

    def rest(self) -> bytes:
        """The last line, which has no line end."""
        return bytes(self._pending)

    def _outgrown(self, piece: bytes) -> bool:
        """Append `piece` to the line; returns whether it makes the line too long."""
        if self._skipping:
            return False
        self._skipping = len(self._pending) + len(piece) > self._limit
        if self._skipping:
            self._pending.clear()
        else:
            self._pending += piece
        return self._skipping


class Child(subprocess.Popen[bytes]):
    """A process that speaks lines of JSON over its standard input and output, as its parent sees it. It leads a process
    group, whose other processes end with it: Ctrl-C in a terminal is for the parent, which ends its children in
    order."""

    def __init__(
        self,
        command: Sequence[str],
        on_message: Callable[[Any], object],
        on_exit: Callable[[int], object],
        *,
        most: float = math.inf,
        errors: int | IO[Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process. Raises OSError, ValueError or TypeError.

        on_message: called in a thread with what each line says. on_exit: called there after the last line, with the
        exit code. most: bytes of a line; a process that writes a longer one, or one that is not JSON, is killed.
        errors: standard error, as `subprocess.Popen` takes it.
        """
        pipe = subprocess.PIPE
        super().__init__(command, 0, None, pipe, pipe, errors, env=environment, start_new_session=True)
        self.broke_off = False  # whether the process was killed for what it wrote
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()  # to be written; None closes the pipe
        for run in (self._write, lambda: self._read(on_message, on_exit, Lines(most))):
            threading.Thread(target=run, name="child", daemon=True).start()

    def tell(self, *messages: Any) -> None:
        """Send a line for each value, without waiting; a process that has ended hears nothing."""
        for value in messages:
            self._lines.put(_line(value))

    def close(self) -> None:
        """Close the process's standard input, at which it ends in order."""
        self._lines.put(None)

    def kill(self) -> None:
        """Kill the process and the other processes of its group, which it has started."""
        if self.poll() is None:
            self._kill_group()
            super().kill()  # it may not have begun its group yet

    def end(self, seconds: float = 0.0) -> int:
        """Give the process `seconds` to end in order, kill it and its group, and return the exit code."""
        self.close()
        if self.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.wait(seconds)
            self._kill_group()
            super().kill()
        return self.wait()

    def forget(self) -> None:
        """Close the pipes in a forked process: the child belongs to the process that has started it."""
        self.returncode = 0
        for pipe in (self.stdin, self.stdout):
            assert pipe is not None
            pipe.close()

    def _kill_group(self) -> None:
        if hasattr(os, "killpg"):  # not on Windows
            with suppress(OSError):  # nobody is left
                os.killpg(self.pid, signal.SIGKILL)

    # -- the threads -----------------------------------------------------------------------------------------------

    def _write(self) -> None:
        assert self.stdin is not None
        with suppress(OSError):  # it has ended
            while (line := self._lines.get()) is not None:
                _write_all(self.stdin, line)
        with suppress(OSError):
            self.stdin.close()

    def _read(self, on_message: Callable[[Any], object], on_exit: Callable[[int], object], lines: Lines) -> None:
        assert self.stdout is not None
        with suppress(RuntimeError):  # an event loop that has been closed hears nothing
            try:
                _hear(self.stdout.fileno(), on_message, lines)
            except (ValueError, RecursionError):
                self.broke_off = True
                self.kill()
            code = self.wait()
            self._kill_group()
            self.stdout.close()
            self.close()
            on_exit(code)


class Parent:
    """The parent of this process, which is a `Child`: standard input and output are for nothing else from now on."""

    def __init__(self, on_message: Callable[[Any], object], gone: Callable[[], object]) -> None:
        """on_message: called in a thread with what each line says. gone: called there once the parent has closed the
        pipe, or has ended."""
        self._out = os.fdopen(os.dup(1), "wb", 0)
        self._lock = threading.Lock()
        os.dup2(2, 1)  # what else is printed is no line of the protocol
        threading.Thread(target=self._read, args=(on_message, gone), name="parent", daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send a line; nothing happens if the parent is gone."""
        with self._lock, suppress(BrokenPipeError):
            _write_all(self._out, _line(message))

    def _read(self, on_message: Callable[[Any], object], gone: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # an event loop that has been closed hears nothing
            _hear(0, on_message, Lines())  # not sys.stdin: the interpreter cannot end while a thread waits in it
            gone()


def answer_lines(begin: Callable[[Any], Callable[[Any], Any]], memory: int, seconds: float = 0.0) -> None:
    """Be a worker with limits, for a parent that does not trust what the worker reads: answer lines until it closes
    the pipe. The system ends this process at a limit; on Windows the parent does.

    begin: called with what the first line says, returns a function that answers each further line; None says nothing.
    memory: bytes of address space. seconds: of processor time for a line; 0: no limit.
    """
    limit_memory(memory)
    lines = sys.stdin.buffer
    try:
        for first in lines:
            answer = begin(json.loads(first))
            for line in lines:
                limit_time(seconds)
                if (reply := answer(json.loads(line))) is not None:
                    say(reply)
                limit_time(0.0)
    except MemoryError:  # too little is left for an answer
        os._exit(OUT_OF_MEMORY)


def say(value: Any) -> None:
    """Send a worker's parent a line."""
    sys.stdout.buffer.write(_line(value))
    sys.stdout.buffer.flush()


def limit_memory(size: int) -> None:
    """Have the system refuse this process more than `size` bytes of address space."""
    with suppress(ImportError, ValueError, OSError):  # Windows has no limits, and macOS may refuse to set one
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(seconds: float) -> None:
    """Have the system end this process after `seconds` of processor time from now; 0 removes the limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _write_all(pipe: IO[bytes], data: bytes) -> None:
    while data:
        data = data[pipe.write(data) :]


def _hear(pipe: int, on_message: Callable[[Any], object], lines: Lines) -> None:
    """Call `on_message` with what each line of a pipe says, up to its end. Raises ValueError or RecursionError."""
    while data := os.read(pipe, _READ):
        for line in lines.feed(data):
            if line is None:
                raise ValueError("a line is too long")
            on_message(json.loads(line))
