"""Persistent threads that run tapes: lists of kernels, one after another, each over its units.

The units of an entry that no thread has taken yet are counted. A thread takes some by compare-and-exchange, runs the
kernel on them, and adds them to the entry's completed units. When all are completed, the threads go on to the next
entry. So a thread that the system has suspended holds up the others only by the units that it has taken, and a thread
that wakes up late joins in where the others are.

The counter of units left has the number of the run in its upper half. So a thread of an earlier run cannot take units
of a later one, and a thread that has taken units knows that the tape exists until they are completed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from engine.backends.native.compiler import Kernel, LoadedObject, compile_object
from engine.backends.native.emit import Emitter
from engine.backends.native.target import best
from engine.backends.native.values import I64, POINTER, Value
from model_loaders.forks import renew_in_children

# The state, in fields of 8 bytes: a head, then a slot for each entry of the tape.
_RUN, _TAPE, _COUNT, _HEAD = 0, 1, 2, 8
_LEFT, _COMPLETED, _UNITS, _GRAIN, _SLOT = 0, 1, 2, 3, 4
MOST_ENTRIES = 1 << 13

_SPINS = 2_000  # polls, some tens of microseconds, before a waiting thread offers its core to others
_IDLE_SPINS = 5_000  # polls before a thread without work goes to sleep
SCRATCH = 1 << 20  # bytes of each thread


class Launch(NamedTuple):
    """A kernel's address, the address of its arguments, its units, and how many of them a thread takes at a time."""

    kernel: int
    arguments: int
    units: int
    grain: int


class Tape:
    """Launches that run one after another. units (entries,): int64, may be changed between runs."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        assert len(launches) <= MOST_ENTRIES
        table = np.array(launches, np.int64).reshape(-1, 4)
        self.calls = np.ascontiguousarray(table[:, :2])
        self.units = table[:, 2].copy()
        self.grain = table[:, 3].copy()


def _relax(e: Emitter) -> None:
    """Tell the core that this thread is waiting."""
    if e.is_x86:
        e.intrinsic("llvm.x86.sse2.pause", None)


def _emit_take_part(e: Emitter, state: Value, run: Value, scratch: Value, offer_core: Value) -> None:
    """Take part in the run with this number."""
    tag = run << 32
    with e.loop(0, e.load(state, I64, 8 * _COUNT)) as index:
        slot = state + index * (8 * _SLOT) + 8 * _HEAD
        with e.repeat_while() as again:
            word = e.load_atomic(slot + 8 * _LEFT)
            left = word - tag  # negative, or beyond 2³², if the counter belongs to another run
            mine = (left > 0) & (left < 1 << 32)
            again.append(mine)
            with e.when(mine):
                grain = e.load(slot, I64, 8 * _GRAIN)
                size = e.least(left, grain)
                with e.when(e.exchange_if(slot + 8 * _LEFT, word, word - size)):
                    call = e.load(state, POINTER, 8 * _TAPE) + index * 16
                    begin = e.load(slot, I64, 8 * _UNITS) - left
                    e.call(e.load(call, POINTER), e.load(call, POINTER, 8), begin, begin + size, scratch)
                    e.add_atomic(slot + 8 * _COMPLETED, size)
        polls = e.variable(e.i64(0))
        with e.repeat_while() as again:
            waiting = e.load_atomic(slot + 8 * _COMPLETED) < e.load_atomic(slot + 8 * _UNITS)
            again.append(waiting & e.load_atomic(state + 8 * _RUN).equals(run))
            _wait_a_little(e, polls, offer_core)


def _wait_a_little(e: Emitter, polls: Any, offer_core: Value) -> None:
    polls.add(1)
    with e.when(polls.get() > _SPINS):
        e.call(offer_core)
    _relax(e)


def _emit_run(e: Emitter, state: Value, offer_core: Value, begin: Value, end: Value, scratch: Value) -> None:
    """The run with the number `begin`, on the calling thread and all workers that are awake."""
    _emit_take_part(e, state, begin, scratch, offer_core)


def _emit_serve(
    e: Emitter, state: Value, offer_core: Value, served: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Take part in runs until none has come for a while. *served: number of the last one."""
    idle = e.variable(e.i64(0))
    with e.repeat_while() as again:
        run = e.load_atomic(state + 8 * _RUN)
        is_new = e.load(served, I64) < run
        with e.when(is_new):
            _emit_take_part(e, state, run, scratch, offer_core)
            e.store(run, served)
            idle.set(e.i64(0))
        _relax(e)
        idle.add(1)
        again.append(idle.get() < _IDLE_SPINS)


_RUN_KERNEL = Kernel("run", _emit_run, ("state", "offer_core"))
_SERVE_KERNEL = Kernel("serve", _emit_serve, ("state", "offer_core", "served"))


def _offer_core() -> int:
    """Address of the system's function by which a thread lets others run."""
    library, name = (
        (ctypes.CDLL("kernel32"), "SwitchToThread") if os.name == "nt" else (ctypes.CDLL(None), "sched_yield")
    )
    function = getattr(library, name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


class _Worker:
    """A thread that serves runs, and sleeps while there are none."""

    def __init__(self, serve: Callable[..., None], state: np.ndarray, offer_core: int) -> None:
        self._state, self._serve = state, serve
        self._served = np.zeros(1, np.int64)
        self._arguments = _SERVE_KERNEL.pack([state.ctypes.data, offer_core, self._served.ctypes.data])
        self._scratch = aligned(SCRATCH)
        self._wake = threading.Semaphore(0)
        self._sleeps = False
        threading.Thread(target=self._live, name="kernels", daemon=True).start()

    def _live(self) -> None:
        while True:
            self._serve(self._arguments.ctypes.data, 0, 0, self._scratch.ctypes.data)
            # A run that starts between these two lines is seen here, or its starter sees the flag.
            self._sleeps = True
            if self._state[_RUN] == self._served[0]:
                self._wake.acquire()
            self._sleeps = False

    def wake(self) -> None:
        if self._sleeps:
            self._sleeps = False
            self._wake.release()


class Workers:
    """The threads of this process that run kernels. One tape runs at a time; others wait for it."""

    def __init__(self) -> None:
        level = best()
        self._loaded = [LoadedObject(compile_object(kernel, level), level) for kernel in (_RUN_KERNEL, _SERVE_KERNEL)]
        self._run, self._serve = (_Function(code.address) for code in self._loaded)
        self._offer_core = _offer_core()
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """New state and no threads: in a forked child, where the old ones do not exist."""
        self._state = aligned(8 * (_HEAD + _SLOT * MOST_ENTRIES)).view(np.int64)
        self._slots = self._state[_HEAD:].reshape(-1, _SLOT)
        self._arguments = _RUN_KERNEL.pack([self._state.ctypes.data, self._offer_core])
        self._scratch = aligned(SCRATCH)
        self._workers: list[_Worker] = []
        self._number = 0
        self._lock = threading.Lock()

    def run(self, tape: Tape, threads: int) -> None:
        """Run all launches of the tape in order, each on up to `threads` threads."""
        count = len(tape.units)
        with self._lock:
            while len(self._workers) < threads - 1:
                self._workers.append(_Worker(self._serve, self._state, self._offer_core))
            self._number += 1
            number = self._number & 0x3FFFFFFF
            slots = self._slots[:count]
            slots[:, _UNITS] = tape.units
            slots[:, _GRAIN] = tape.grain
            slots[:, _COMPLETED] = 0
            slots[:, _LEFT] = tape.units + (number << 32)
            self._state[_TAPE], self._state[_COUNT] = tape.calls.ctypes.data, count
            self._state[_RUN] = number
            for worker in self._workers[: threads - 1]:
                worker.wake()
            self._run(self._arguments.ctypes.data, number, 0, self._scratch.ctypes.data)


def aligned(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed bytes at an aligned address: uint8 (nbytes,)."""
    whole = np.zeros(nbytes + alignment, np.uint8)
    first = -whole.ctypes.data % alignment
    return whole[first : first + nbytes]


@cache
def workers() -> Workers:
    """The workers of this process."""
    return Workers()
