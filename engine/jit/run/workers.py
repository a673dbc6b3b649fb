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
buffer of a single thread waits for no other. Workers stay in compiled code even while they sleep: they never wait for
Python's global lock, and never run Python while the interpreter exits. No Python runs between the start and the end of
a command buffer, so when an exception such as Ctrl-C's is raised, the buffer has either not started or completed.

An owner may also begin a run, and add command buffers while workers run what is there: Python prepares each of them
meanwhile. The owner takes part once it finishes the run. An exception between these leaves a run open, which its owner
alone can finish, at any later time; until then no other runs.

Everything that threads share is one piece of memory, the state: a head with the fields below, a mutex and two condition
variables of the system, and a slot for each entry of the command buffer.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.jit.compile.library import library
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.lang import I64, POINTER, Emitter, Int64, Kernel, Pointer, Value, Variable, records
from polarlm.engine.jit.run.buffers import aligned_bytes
from polarlm.model_loaders.forks import cached_property, renew_in_children

MOST_ENTRIES = 1 << 13  # most entries of a command buffer

# Offsets in the state, in bytes. Fields that are polled, that are changed under the mutex, and that never change are in
# different cache lines.
_RUN, _THREADS, _RANGES = range(0, 24, 8)
_ENTRIES = 64  # twice their number, and one more once no other will be added
_LOCK, _UNLOCK, _WAIT, _WAKE_ALL, _OFFER_CORE = range(128, 168, 8)
_NEXT_TICKET, _SERVED_TICKET = 192, 200  # tickets: the next caller's, and the one that may run now
_OWNER = 208  # who has begun the run that others are added to; 0 if there is none
_MUTEX, _WORK, _TURN = 256, 384, 512
_HEAD = 640
_COMPLETED_UNITS, _UNITS, _GRAIN, _RANGE_UNITS, _AWAITED_UNITS, _KERNEL, _ARGUMENTS = range(0, 56, 8)
_UNITS_LEFT = 64
_MOST_RANGES = 16  # most ranges that an entry's units are cut into; further threads share them
_SLOT = _UNITS_LEFT + 8 * _MOST_RANGES
_SLEEP_FLAGS = _HEAD + _SLOT * MOST_ENTRIES  # an int64 for each thread: 1 while it sleeps for lack of work
MOST_THREADS = 1024
STATE_BYTES = _SLEEP_FLAGS + 8 * MOST_THREADS

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
    """Arguments of all kernels but `SERVE`: the shared state, which `RUN_ALONE` does not use, the table of launches and
    their count, the number of threads, and who begins a run to add to it, or 0."""

    state: Pointer
    table: Pointer
    count: Int64
    threads: Int64
    owner: Int64 = 0


class Serve(NamedTuple):
    """Arguments of `SERVE`: the shared state, and the thread's number."""

    state: Pointer
    number: Int64


def set_up(state: np.ndarray) -> None:
    """Initialize the state, STATE_BYTES zeros (uint8, aligned to 64 bytes), before the first run."""
    if os.name == "nt":  # zeros are a valid mutex and condition variable there
        library, names = ctypes.CDLL("kernel32"), ["AcquireSRWLockExclusive", "ReleaseSRWLockExclusive"]
        names += ["SleepConditionVariableSRW", "WakeAllConditionVariable", "SwitchToThread"]
    else:
        library, names = ctypes.CDLL(None), ["pthread_mutex_lock", "pthread_mutex_unlock"]
        names += ["pthread_cond_wait", "pthread_cond_broadcast", "sched_yield"]
        address = state.ctypes.data
        library.pthread_mutex_init(ctypes.c_void_p(address + _MUTEX), None)
        for condition in (_WORK, _TURN):
            library.pthread_cond_init(ctypes.c_void_p(address + condition), None)
    functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]
    state[_LOCK : _OFFER_CORE + 8].view(np.int64)[:] = functions


class _State:
    def __init__(self, emitter: Emitter, pointer: Value) -> None:
        self._e, self.pointer = emitter, pointer

    def _system(self, function: int, *arguments: Value) -> None:
        self._e.call(self._e.load(self.pointer, POINTER, function), *arguments)

    @contextmanager
    def lock(self) -> Iterator[None]:
        self._system(_LOCK, self.pointer + _MUTEX)
        yield
        self._system(_UNLOCK, self.pointer + _MUTEX)

    def wait(self, condition: int) -> None:
        """Unlock, sleep until the condition is signalled, and lock again. Spurious wake-ups are possible."""
        # Windows takes two more arguments, an infinite timeout and no flags; other systems ignore them.
        no_timeout, has_no_work = self._e.i64(0xFFFFFFFF), self._e.i64(0)
        self._system(_WAIT, self.pointer + condition, self.pointer + _MUTEX, no_timeout, has_no_work)

    def wake_all(self, condition: int) -> None:
        self._system(_WAKE_ALL, self.pointer + condition)

    def wait_a_little(self, polls: Variable) -> None:
        """Poll again soon: yield the core to other threads after many polls."""
        polls.add(1)
        with self._e.when(polls.get() > _SPINS):
            self._system(_OFFER_CORE)
        if self._e.is_x86:  # tell the core that this is a spin loop
            self._e.intrinsic("llvm.x86.sse2.pause", None)

    def load(self, field: int) -> Value:
        """The value of a field that no other thread changes at this time."""
        return self._e.load(self.pointer, I64, field)

    def store(self, value: Value, field: int) -> None:
        self._e.store(value, self.pointer, field)

    def run(self) -> Value:
        """The number of the newest run, which another thread may begin at any time."""
        return self._e.load_atomic(self.pointer + _RUN)

    def slot(self, entry: Value) -> Value:
        return self.pointer + entry * _SLOT + _HEAD

    def sleep_flag(self, number: Value) -> Value:
        return self.pointer + number * 8 + _SLEEP_FLAGS


def _emit_run(e: Emitter, args: Run, begin: Value, end: Value, scratch: Value) -> None:
    """Run a command buffer on the calling thread and up to threads − 1 workers, after the runs of earlier callers."""
    state = _State(e, args.state)
    run = _wait_for_turn(e, state)
    _add_entries(e, state, run, args, e.i64(0), e.imin(args.threads, _MOST_RANGES))
    _publish(e, state, run, args, args.count * 2 + 1)
    _emit_take_part(e, state, run, e.i64(0), scratch)
    _end_turn(e, state)


def _emit_begin(e: Emitter, args: Run, begin: Value, end: Value, scratch: Value) -> None:
    """Let workers begin a command buffer, to which its owner adds others, after the runs of earlier callers."""
    state = _State(e, args.state)
    run = _wait_for_turn(e, state)
    e.store_atomic(args.owner, state.pointer + _OWNER)
    _add_entries(e, state, run, args, e.i64(0), e.imin(args.threads, _MOST_RANGES))
    _publish(e, state, run, args, args.count * 2)


def _emit_add(e: Emitter, args: Run, begin: Value, end: Value, scratch: Value) -> None:
    """Add a command buffer to the one that its owner has begun."""
    state = _State(e, args.state)
    with e.when(e.load_atomic(state.pointer + _OWNER).equals(args.owner)):
        entries = state.load(_ENTRIES)
        _add_entries(e, state, state.load(_RUN), args, entries >> 1, state.load(_RANGES))
        e.store_atomic(entries + args.count * 2, state.pointer + _ENTRIES)


def _emit_finish(e: Emitter, args: Run, begin: Value, end: Value, scratch: Value) -> None:
    """Take part in what the owner has begun until all of it is completed; nothing, if it has begun nothing."""
    state = _State(e, args.state)
    with e.when(e.load_atomic(state.pointer + _OWNER).equals(args.owner)):
        e.store_atomic(state.load(_ENTRIES) | 1, state.pointer + _ENTRIES)
        _emit_take_part(e, state, state.load(_RUN), e.i64(0), scratch)
        e.store_atomic(e.i64(0), state.pointer + _OWNER)
        _end_turn(e, state)


def _wait_for_turn(e: Emitter, state: _State) -> Value:
    """Wait until earlier callers' runs are completed, and return the number of the next run."""
    with state.lock():
        turn = state.load(_NEXT_TICKET)
        state.store(turn + 1, _NEXT_TICKET)
        with e.repeat_while() as conditions:
            must_wait = ~state.load(_SERVED_TICKET).equals(turn)
            with e.when(must_wait):
                state.wait(_TURN)
            conditions.append(must_wait)
    return (state.load(_RUN) + 1) & _NUMBERS


def _end_turn(e: Emitter, state: _State) -> None:
    """Let the next caller run."""
    with state.lock():
        turn = state.load(_SERVED_TICKET)
        state.store(turn + 1, _SERVED_TICKET)
        with e.when(~state.load(_NEXT_TICKET).equals(turn + 1)):
            state.wake_all(_TURN)


def _add_entries(e: Emitter, state: _State, run: Value, args: Run, first: Value, ranges: Value) -> None:
    """Write the slots of a table's launches, from slot `first` on."""
    overlapped_units = e.variable(e.i64(0))  # units of launches before that have not been waited for
    with e.loop(0, args.count) as entry:
        slot, launch = state.slot(first + entry), records.read(e, Launch, args.table, entry)
        units = launch.units
        each = (units + ranges - 1) // ranges
        for field, value in ((_UNITS, units), (_GRAIN, launch.grain), (_RANGE_UNITS, each)):
            e.store(value, slot, field)
        e.store(launch.kernel, slot, _KERNEL)
        e.store(launch.arguments, slot, _ARGUMENTS)
        overlapped_units.add(units)
        overlaps = launch.overlaps.equals(1)
        e.store(e.select(overlaps, e.i64(0), overlapped_units.get()), slot, _AWAITED_UNITS)
        overlapped_units.set(e.select(overlaps, overlapped_units.get(), e.i64(0)))
        e.store_atomic(e.i64(0), slot + _COMPLETED_UNITS, "release")
        with e.loop(0, ranges) as number:
            left = e.imax(e.imin(units - number * each, each), 0)
            e.store_atomic((run << 32) + left, slot + number * 8 + _UNITS_LEFT, "release")


def _publish(e: Emitter, state: _State, run: Value, args: Run, entries: Value) -> None:
    """Let workers see the run, and wake those that sleep. entries: see `_ENTRIES`."""
    state.store(args.threads, _THREADS)
    state.store(e.imin(args.threads, _MOST_RANGES), _RANGES)
    e.store_atomic(entries, state.pointer + _ENTRIES)
    e.store_atomic(run, state.pointer + _RUN)
    sleep_flag = e.variable(e.i64(0))
    with e.loop(1, e.imin(args.threads, MOST_THREADS)) as number:
        sleep_flag.add(e.load_atomic(state.sleep_flag(number)))
    with e.when(sleep_flag.get() > 0), state.lock():
        state.wake_all(_WORK)


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
    with e.repeat_while() as conditions:
        run = state.run()
        with e.when(~run.equals(served.get())):
            served.set(run)
            with e.when(number < state.load(_THREADS)):
                _emit_take_part(e, state, run, number, scratch)
                polls.set(e.i64(0))
        state.wait_a_little(polls)
        with e.when(polls.get() > _IDLE_SPINS):
            _sleep(e, state, number, served)
            polls.set(e.i64(0))
        conditions.append(e.i64(0).equals(0))


def _sleep(e: Emitter, state: _State, number: Value, served: Variable) -> None:
    """Sleep until a run has more than `number` threads. served: the number of the last run seen."""
    with state.lock():
        e.store_atomic(e.i64(1), state.sleep_flag(number))
        # Either a run that starts now is seen here, or its caller sees that this thread sleeps and wakes it.
        with e.repeat_while() as conditions:
            run = state.run()
            has_no_work = run.equals(served.get()) | (number >= state.load(_THREADS))
            with e.when(has_no_work):
                served.set(run)
                state.wait(_WORK)
            conditions.append(has_no_work)
        e.store_atomic(e.i64(0), state.sleep_flag(number))


def _emit_take_part(e: Emitter, state: _State, run: Value, number: Value, scratch: Value) -> None:
    """Take part in run number `run` until it is completed or another run has started.

    number: this thread's. It takes units of its own range first, and then of the following ranges.
    """
    ranges, done = state.load(_RANGES), e.variable(e.i64(0))
    number_of_entry, polls = e.variable(e.i64(0)), e.variable(e.i64(0))
    with e.repeat_while() as conditions:
        entries = e.load_atomic(state.pointer + _ENTRIES)
        entry = number_of_entry.get()
        is_there = entry < entries >> 1
        with e.when(is_there):
            _run_entry(e, state, run, entry, number, ranges, done, scratch)
            number_of_entry.add(1)
            polls.set(e.i64(0))
        with e.when(~is_there):
            state.wait_a_little(polls)
        conditions.append((is_there | (entries & 1).equals(0)) & state.run().equals(run))


def _run_entry(
    e: Emitter, state: _State, run: Value, entry: Value, number: Value, ranges: Value, done: Variable, scratch: Value
) -> None:
    """Take units of an entry, and wait until those are completed that the next entry waits for."""
    slot = state.slot(entry)
    range_number = e.variable(number % ranges)
    with e.loop(0, ranges):
        _emit_empty_range(e, state, run, entry, range_number.get(), done, scratch)
        next_range = range_number.get() + 1
        range_number.set(e.select(next_range < ranges, next_range, e.i64(0)))
    # Units of a launch that overlaps the next one are awaited with the next one's units.
    with e.when((done.get() > 0) & (e.load(slot, I64, _AWAITED_UNITS) > 0)):
        e.add_atomic(slot + _COMPLETED_UNITS, done.get())
        done.set(e.i64(0))
    polls = e.variable(e.i64(0))
    with e.repeat_while() as conditions:
        waits = e.load_atomic(slot + _COMPLETED_UNITS) < e.load_atomic(slot + _AWAITED_UNITS)
        waits = waits & state.run().equals(run)
        conditions.append(waits)
        with e.when(waits):
            state.wait_a_little(polls)


def _emit_empty_range(
    e: Emitter, state: _State, run: Value, entry: Value, number: Value, done: Variable, scratch: Value
) -> None:
    """Run units of range `number` of an entry until none is left, and add their count to `done`."""
    slot = state.slot(entry)
    counter = slot + number * 8 + _UNITS_LEFT
    with e.repeat_while() as conditions:
        word = e.load_atomic(counter)
        left = word - (run << 32)  # negative, or at least 2³², if the slot belongs to another run
        is_mine = (left > 0) & (left < 1 << 32)
        conditions.append(is_mine)
        with e.when(is_mine):
            size = e.imin(left, e.load(slot, I64, _GRAIN))
            with e.when(e.exchange_if(counter, word, word - size)):
                first = e.imin((number + 1) * e.load(slot, I64, _RANGE_UNITS), e.load(slot, I64, _UNITS)) - left
                kernel, arguments = e.load(slot, POINTER, _KERNEL), e.load(slot, POINTER, _ARGUMENTS)
                e.call(kernel, arguments, first, first + size, scratch)
                done.add(size)


RUN = Kernel("run", _emit_run, Run)
BEGIN = Kernel("begin", _emit_begin, Run)
ADD = Kernel("add", _emit_add, Run)
FINISH = Kernel("finish", _emit_finish, Run)
RUN_ALONE = Kernel("run_alone", _emit_run_alone, Run)
SERVE = Kernel("serve", _emit_serve, Serve)

SCRATCH = 1 << 21  # bytes of scratch per thread; pages take memory once written


class CommandBuffer:
    """Launches that run in order. units (entries,) int64, below 2³¹: their unit counts, writable between runs. grains
    (entries,): how many of them a thread takes at a time."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        assert len(launches) <= MOST_ENTRIES, len(launches)
        assert all(launch.grain > 0 for launch in launches)
        self._table = np.frombuffer(bytearray(b"".join(map(records.pack, launches))), np.int64)
        self._table[-1:] = 0  # overlaps: the buffer ends when all of it is completed
        self.units, self.grains = (self._table[field :: len(Launch._fields)] for field in (2, 3))
        self.address = records.address(self._table)

    @cached_property
    def single_thread_run(self) -> bytes:
        return records.pack(Run(state=None, table=self.address, count=len(self.units), threads=1))


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


class Workers:
    def __init__(self) -> None:
        self._code = library(LEVELS[0])  # this code gains nothing from a higher level
        kernels = RUN, RUN_ALONE, SERVE, BEGIN, ADD, FINISH
        functions = [_Function(self._code.address(kernel)) for kernel in kernels]
        self._run, self._run_alone, self._serve, self._begin, self._add, self._finish = functions
        self._local = threading.local()
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Reset to new state without threads: for a forked child, in which the old threads do not exist."""
        self._state = aligned_bytes(STATE_BYTES)
        set_up(self._state)
        self._scratch = aligned_bytes(SCRATCH)
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
                    keep = arguments, self._state, self._code, aligned_bytes(SCRATCH)
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
            self._run_alone(commands.single_thread_run, 0, 0, self._scratch_of_caller())
            return
        if self._number < threads - 1:
            self.start(threads)
        state, scratch = self._addresses
        run = Run(state=state, table=commands.address, count=len(commands.units), threads=threads)
        self._run(records.pack(run), 0, 0, scratch)

    def begin(self, commands: CommandBuffer, threads: int, owner: int) -> None:
        """Begin a run of up to `threads` threads, 2 or more, which `finish` ends: nobody else's runs before. owner: of
        all that may have begun one at this time no other has this number, which is not 0."""
        if self._number < threads - 1:
            self.start(threads)
        self._call(self._begin, commands, threads, owner)

    def add(self, commands: CommandBuffer, owner: int) -> None:
        """Add launches to the run that the owner has begun, up to MOST_ENTRIES in all; they run in order."""
        self._call(self._add, commands, 0, owner)

    def _call(self, function: Any, commands: CommandBuffer, threads: int, owner: int) -> None:
        run = Run(self._addresses[0], commands.address, len(commands.units), threads, owner)
        function(records.pack(run), 0, 0, 0)

    def finish(self, owner: int) -> None:
        """Take part in the run that the owner has begun, if it has, until all of it is completed."""
        state, scratch = self._addresses
        self._finish(records.pack(Run(state, table=None, count=0, threads=0, owner=owner)), 0, 0, scratch)

    def _scratch_of_caller(self) -> int:
        try:
            address: int = self._local.address
        except AttributeError:
            memory = self._local.scratch = aligned_bytes(SCRATCH)
            address = self._local.address = memory.ctypes.data
        return address


_instances: list[Workers] = []


def workers() -> Workers:
    if not _instances:
        # Without a lock, which could stay locked in a forked child: if two threads make one at once, the first is used.
        _instances.append(Workers())
    return _instances[0]
