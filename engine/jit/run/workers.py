"""Persistent threads that run command buffers: lists of kernels that run in order, each over its units.

The units of an entry are cut into ranges, one per thread, and each range has a counter of units left. A thread takes
units by compare-and-exchange and runs the kernel on them: first units of its own range, so that it reads weights in
memory order, and then units of other ranges. When none is left, it adds the number of units that it has run to the
entry's completed units. When all are completed, the threads proceed to the next entry; an entry that overlaps the next
one is awaited together with it. So a thread that the system has suspended delays the others only by the units that it
has taken, and a thread that wakes up late joins at the entry that the others have reached.

The upper half of a counter is the run's number. So a thread of an earlier run cannot take units of a later one, and
the command buffer exists as long as a thread has units that are not completed. (Numbers repeat after 2³¹ runs: only a
thread that is suspended for exactly that many runs, for months, could confuse two.)

Only one command buffer of several threads runs at a time; buffers of several engines run in order of arrival. A command
buffer of a single thread waits for no other. Workers stay in compiled code (`run_commands.py`) even while they sleep:
they never wait for Python's global lock, and never run Python while the interpreter exits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine.jit.compile.library import library
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.lang.records import pack
from polarlm.engine.jit.run.buffers import aligned
from polarlm.engine.jit.run.run_commands import (
    MOST_ENTRIES,
    MOST_THREADS,
    RUN,
    RUN_ALONE,
    SERVE,
    STATE_BYTES,
    Launch,
    Run,
    Serve,
    set_up,
)
from polarlm.model_loaders.forks import cached_property, renew_in_children

SCRATCH = 1 << 20  # bytes of scratch per thread


class CommandBuffer:
    """Launches that run in order. units (entries,) int64, below 2³¹: their unit counts, writable between runs."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        assert len(launches) <= MOST_ENTRIES, len(launches)
        assert all(launch.grain > 0 for launch in launches)
        self._table = np.array(launches, np.int64).reshape(-1, len(Launch._fields))
        self._table[-1:, Launch._fields.index("overlaps")] = 0  # the buffer ends when all of it is completed
        self.units = self._table[:, 2]
        self.address = self._table.ctypes.data

    @cached_property
    def alone(self) -> bytes:
        """The packed arguments of a run on one thread."""
        return pack(Run(state=None, table=self.address, count=len(self.units), threads=1))


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


class Workers:
    """The threads of this process that run kernels."""

    def __init__(self) -> None:
        self._code = library(LEVELS[0])  # this code gains nothing from a higher level
        kernels = RUN, RUN_ALONE, SERVE
        self._run, self._run_alone, self._serve = (_Function(self._code.address(kernel)) for kernel in kernels)
        self._local = threading.local()
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Reset to new state without threads: for a forked child, in which the old threads do not exist."""
        self._state = aligned(STATE_BYTES)
        set_up(self._state)
        self._scratch = aligned(SCRATCH)
        self._addresses = self._state.ctypes.data, self._scratch.ctypes.data
        self._number = 0  # number of workers
        self._starting = threading.Lock()
        self._is_refused = False

    def start(self, threads: int) -> int:
        """Start the workers for `threads` threads, callers included; returns how many threads can run.

        These are fewer if the system refuses to start a worker; then no more are tried.
        """
        with self._starting:
            while self._number < min(threads, MOST_THREADS) - 1 and not self._is_refused:
                arguments = SERVE.pack(Serve(state=self._state, number=self._number + 1))
                try:
                    keep = arguments, self._state, self._code, aligned(SCRATCH)
                    threading.Thread(target=self._live, args=keep, name="kernels", daemon=True).start()
                except (RuntimeError, MemoryError):
                    self._is_refused = True
                else:
                    self._number += 1
        return min(threads, self._number + 1)

    def _live(self, arguments: np.ndarray, state: np.ndarray, code: Any, scratch: np.ndarray) -> None:
        """The body of a worker thread. Its arguments keep alive what its compiled code uses until the process exits."""
        self._serve(arguments.ctypes.data, 0, 0, scratch.ctypes.data)

    def run(self, commands: CommandBuffer, threads: int) -> None:
        """Run all launches in order, each on up to `threads` threads. Thread-safe."""
        if threads == 1:
            self._run_alone(commands.alone, 0, 0, self._scratch_of_caller())
            return
        if self._number < threads - 1:
            self.start(threads)
        state, scratch = self._addresses
        run = Run(state=state, table=commands.address, count=len(commands.units), threads=threads)
        self._run(pack(run), 0, 0, scratch)

    def _scratch_of_caller(self) -> int:
        """The address of the calling thread's own scratch memory."""
        try:
            memory: np.ndarray = self._local.scratch
        except AttributeError:
            memory = self._local.scratch = aligned(SCRATCH)
        return memory.ctypes.data


_of_this_process: list[Workers] = []


def workers() -> Workers:
    """The workers of this process."""
    if not _of_this_process:
        # Without a lock, which could stay locked in a forked child: if two threads make one at once, the first is used.
        _of_this_process.append(Workers())
    return _of_this_process[0]
