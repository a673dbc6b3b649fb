"""The compiled code that runs command buffers, in callers and in workers; `engine.jit.run.workers` explains it.

Everything that threads share is one piece of memory, the state: a head with the fields below, a mutex and two condition
variables of the system, and a slot for each entry of the command buffer. No Python runs between the start and the end
of a command buffer, so when an exception such as Ctrl-C's is raised, the buffer has either not started or completed.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang import records
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Int64, Pointer
from polarlm.engine.jit.lang.values import I64, POINTER, Value

MOST_ENTRIES = 1 << 13  # most entries of a command buffer

# Offsets in the state, in bytes. Fields that are polled, that are changed under the mutex, and that never change are in
# different cache lines.
_RUN, _THREADS, _TABLE, _COUNT, _RANGES = range(0, 40, 8)
_LOCK, _UNLOCK, _WAIT, _WAKE_ALL, _OFFER_CORE = range(128, 168, 8)
_NEXT, _SERVED = 192, 200  # tickets: the next caller's, and the one that may run now
_MUTEX, _WORK, _TURN = 256, 384, 512
_HEAD = 640
_COMPLETED, _UNITS, _GRAIN, _RANGE_UNITS, _AWAITED, _LEFT = 0, 8, 16, 24, 32, 64
_MOST_RANGES = 16  # most ranges that an entry's units are cut into; further threads share them
_SLOT = _LEFT + 8 * _MOST_RANGES
_ASLEEP = _HEAD + _SLOT * MOST_ENTRIES  # an int64 for each thread: 1 while it sleeps for lack of work
MOST_THREADS = 1024
STATE_BYTES = _ASLEEP + 8 * MOST_THREADS

_SPINS = 2_000  # polls, some tens of microseconds, before a waiting thread yields its core
_IDLE_SPINS = 5_000  # polls before a thread without work sleeps
_NUMBERS = (1 << 31) - 1  # mask of a run's number, which has 31 bits


class Launch(NamedTuple):
    """A kernel's address, its arguments' address, its unit count, and how many units a thread takes at a time.

    overlaps: 1 if the next launch begins before this one is completed, else 0.
    """

    kernel: Pointer
    arguments: Pointer
    units: Int64
    grain: Int64
    overlaps: Int64 = 0


class Run(NamedTuple):
    """Arguments of `RUN` and `RUN_ALONE`: the shared state, which `RUN_ALONE` does not use, the table of launches and
    their count, and the number of threads."""

    state: Pointer
    table: Pointer
    count: Int64
    threads: Int64


class Serve(NamedTuple):
    """Arguments of `SERVE`: the shared state, and the thread's number."""

    state: Pointer
    number: Int64


def set_up(state: np.ndarray) -> None:
    """Initialize the state, STATE_BYTES zeros (uint8, aligned to 64 bytes), before the first run."""
    names = ["AcquireSRWLockExclusive", "ReleaseSRWLockExclusive", "SleepConditionVariableSRW"]
    names += ["WakeAllConditionVariable", "SwitchToThread"]
    if os.name == "nt":  # zeros are a valid mutex and condition variable there
        library = ctypes.CDLL("kernel32")
    else:
        library = ctypes.CDLL(None)
        names = ["pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"]
        names += ["sched_yield"]
        address = state.ctypes.data
        library.pthread_mutex_init(ctypes.c_void_p(address + _MUTEX), None)
        for condition in (_WORK, _TURN):
            library.pthread_cond_init(ctypes.c_void_p(address + condition), None)
    functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    state[_LOCK : _OFFER_CORE + 8].view(np.int64)[:] = functions


class _State:
    """Emits accesses to the state."""

    def __init__(self, emitter: Emitter, pointer: Value) -> None:
        self._e, self.pointer = emitter, pointer

    def _system(self, function: int, *arguments: Value) -> None:
        self._e.call(self._e.load(self.pointer, POINTER, function), *arguments)

    def lock(self) -> None:
        self._system(_LOCK, self.pointer + _MUTEX)

    def unlock(self) -> None:
        self._system(_UNLOCK, self.pointer + _MUTEX)

    def wait(self, condition: int) -> None:
        """Unlock, sleep until the condition is signalled, and lock again. Spurious wake-ups are possible."""
        # Windows takes two more arguments, an infinite timeout and no flags; other systems ignore them.
        forever, none = self._e.i64(0xFFFFFFFF), self._e.i64(0)
        self._system(_WAIT, self.pointer + condition, self.pointer + _MUTEX, forever, none)

    def wake_all(self, condition: int) -> None:
        self._system(_WAKE_ALL, self.pointer + condition)

    def offer_core(self) -> None:
        """Yield the core to other threads."""
        self._system(_OFFER_CORE)

    def relax(self) -> None:
        """Tell the core that this is a spin loop."""
        if self._e.is_x86:
            self._e.intrinsic("llvm.x86.sse2.pause", None)

    def load(self, field: int) -> Value:
        """The value of a field that no other thread changes at this time."""
        return self._e.load(self.pointer, I64, field)

    def store(self, value: Value, field: int) -> None:
        self._e.store(value, self.pointer, field)

    def load_shared(self, field: int) -> Value:
        """The value of a field that other threads change."""
        return self._e.load_atomic(self.pointer + field)

    def store_shared(self, value: Value, field: int) -> None:
        self._e.store_atomic(value, self.pointer + field)

    def slot(self, entry: Value) -> Value:
        return self.pointer + entry * _SLOT + _HEAD

    def asleep(self, number: Value) -> Value:
        return self.pointer + number * 8 + _ASLEEP


def _emit_run(e: Emitter, args: Run, begin: Value, end: Value, scratch: Value) -> None:
    """Run a command buffer on the calling thread and up to threads − 1 workers, after the runs of earlier callers."""
    state = _State(e, args.state)
    state.lock()
    turn = state.load(_NEXT)
    state.store(turn + 1, _NEXT)
    with e.repeat_while() as again:
        must_wait = ~state.load(_SERVED).equals(turn)
        with e.when(must_wait):
            state.wait(_TURN)
        again.append(must_wait)
    state.unlock()

    run = (state.load(_RUN) + 1) & _NUMBERS
    ranges = e.imin(args.threads, _MOST_RANGES)
    overlapped = e.variable(e.i64(0))  # units of launches before that have not been waited for
    with e.loop(0, args.count) as entry:
        slot, launch = state.slot(entry), records.read(e, Launch, args.table, entry)
        units = launch.units
        each = (units + ranges - 1) // ranges
        for field, value in ((_UNITS, units), (_GRAIN, launch.grain), (_RANGE_UNITS, each)):
            e.store(value, slot, field)
        overlapped.add(units)
        overlaps = launch.overlaps.equals(1)
        e.store(e.select(overlaps, e.i64(0), overlapped.get()), slot, _AWAITED)
        overlapped.set(e.select(overlaps, overlapped.get(), e.i64(0)))
        e.store_atomic(e.i64(0), slot + _COMPLETED, "release")
        with e.loop(0, ranges) as number:
            left = e.imax(e.imin(units - number * each, each), 0)
            e.store_atomic((run << 32) + left, slot + number * 8 + _LEFT, "release")
    for field, value in ((_TABLE, args.table), (_COUNT, args.count), (_THREADS, args.threads), (_RANGES, ranges)):
        state.store(value, field)
    state.store_shared(run, _RUN)
    asleep = e.variable(e.i64(0))
    with e.loop(1, e.imin(args.threads, MOST_THREADS)) as number:
        asleep.add(e.load_atomic(state.asleep(number)))
    with e.when(asleep.get() > 0):
        state.lock()
        state.wake_all(_WORK)
        state.unlock()
    _emit_take_part(e, state, run, e.i64(0), scratch)

    state.lock()
    state.store(turn + 1, _SERVED)
    with e.when(~state.load(_NEXT).equals(turn + 1)):
        state.wake_all(_TURN)
    state.unlock()


def _emit_run_alone(e: Emitter, args: Run, begin: Value, end: Value, scratch: Value) -> None:
    """Run a command buffer on the calling thread alone, concurrently with any other run."""
    with e.loop(0, args.count) as entry:
        launch = records.read(e, Launch, args.table, entry)
        with e.when(launch.units > 0):
            e.call(launch.kernel, launch.arguments, e.i64(0), launch.units, scratch)


def _emit_serve(e: Emitter, args: Serve, begin: Value, end: Value, scratch: Value) -> None:
    """Take part in all runs of more than `number` threads, and sleep between them. Never returns."""
    state, number = _State(e, args.state), args.number
    served, polls = e.variable(e.i64(0)), e.variable(e.i64(0))
    with e.repeat_while() as again:
        run = state.load_shared(_RUN)
        with e.when(~run.equals(served.get())):
            served.set(run)
            with e.when(number < state.load(_THREADS)):
                _emit_take_part(e, state, run, number, scratch)
                polls.set(e.i64(0))
        _wait_a_little(e, state, polls)
        with e.when(polls.get() > _IDLE_SPINS):
            _sleep(e, state, number, served)
            polls.set(e.i64(0))
        again.append(e.i64(0).equals(0))


def _sleep(e: Emitter, state: _State, number: Value, served: Any) -> None:
    """Sleep until a run has more than `number` threads. served: the number of the last run seen."""
    state.lock()
    e.store_atomic(e.i64(1), state.asleep(number))
    # Either a run that starts now is seen here, or its caller sees that this thread sleeps and wakes it.
    with e.repeat_while() as again:
        run = state.load_shared(_RUN)
        none = run.equals(served.get()) | (number >= state.load(_THREADS))
        with e.when(none):
            served.set(run)
            state.wait(_WORK)
        again.append(none)
    e.store_atomic(e.i64(0), state.asleep(number))
    state.unlock()


def _emit_take_part(e: Emitter, state: _State, run: Value, number: Value, scratch: Value) -> None:
    """Take part in run number `run` until it is completed or another run has started.

    number: this thread's. It takes units of its own range first, and then of the following ranges.
    """
    ranges, done = state.load(_RANGES), e.variable(e.i64(0))
    with e.loop(0, state.load(_COUNT)) as entry:
        slot = state.slot(entry)
        at = e.variable(number % ranges)
        with e.loop(0, ranges):
            _emit_empty_range(e, state, run, entry, at.get(), done, scratch)
            following = at.get() + 1
            at.set(e.select(following < ranges, following, e.i64(0)))
        # Units of a launch that overlaps the next one are awaited with the next one's units.
        with e.when((done.get() > 0) & (e.load(slot, I64, _AWAITED) > 0)):
            e.add_atomic(slot + _COMPLETED, done.get())
            done.set(e.i64(0))
        polls = e.variable(e.i64(0))
        with e.repeat_while() as again:
            waits = e.load_atomic(slot + _COMPLETED) < e.load_atomic(slot + _AWAITED)
            waits = waits & state.load_shared(_RUN).equals(run)
            again.append(waits)
            with e.when(waits):
                _wait_a_little(e, state, polls)


def _emit_empty_range(
    e: Emitter, state: _State, run: Value, entry: Value, number: Value, done: Any, scratch: Value
) -> None:
    """Run units of range `number` of an entry until none is left, and add their count to `done`."""
    slot = state.slot(entry)
    counter = slot + number * 8 + _LEFT
    with e.repeat_while() as again:
        word = e.load_atomic(counter)
        left = word - (run << 32)  # negative, or at least 2³², if the slot belongs to another run
        mine = (left > 0) & (left < 1 << 32)
        again.append(mine)
        with e.when(mine):
            size = e.imin(left, e.load(slot, I64, _GRAIN))
            with e.when(e.exchange_if(counter, word, word - size)):
                launch = records.read(e, Launch, e.load(state.pointer, POINTER, _TABLE), entry)
                first = e.imin((number + 1) * e.load(slot, I64, _RANGE_UNITS), e.load(slot, I64, _UNITS)) - left
                e.call(launch.kernel, launch.arguments, first, first + size, scratch)
                done.add(size)


def _wait_a_little(e: Emitter, state: _State, polls: Any) -> None:
    polls.add(1)
    with e.when(polls.get() > _SPINS):
        state.offer_core()
    state.relax()


RUN = Kernel("run", _emit_run, Run)
RUN_ALONE = Kernel("run_alone", _emit_run_alone, Run)
SERVE = Kernel("serve", _emit_serve, Serve)
