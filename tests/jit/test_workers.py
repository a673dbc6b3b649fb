"""Command buffers on persistent threads: each unit once, entries in order, whatever threads, forks and signals do."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang import I64, Emitter, Kernel, Value
from polarlm.engine.jit.run import workers as module
from polarlm.engine.jit.run.workers import CommandBuffer, Launch, Workers, workers
from tests.jit.levels import declared, loaded
from tests.requests.test_forks import begun_in_child

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds until a test that hangs fails
POLLS = 20_000_000_000  # until a kernel gives up, half a minute or so: no failure hangs, and a busy machine has time
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def emit_count(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
    """Count each unit, and an error for each that begins before `before` units have ended. Total: of ended units."""
    with e.loop(begin, end) as unit:
        with e.when(e.load_atomic(args.total) < args.before):
            e.add_atomic(args.errors, e.i64(1))
        e.store(e.load(args.counts + unit * 8, I64) + 1, args.counts + unit * 8)
    e.add_atomic(args.total, end - begin)


def emit_await(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
    """The unit `only`, or each if that is negative, waits until the flag reaches the number, for `most` polls.

    `late` counts the units that have not seen it. Before it waits, a unit other than `only` adds one to the flag.
    """
    with e.loop(begin, end) as unit:
        with e.when(~unit.equals(args.only)):
            e.add_atomic(args.flag, e.i64(1))
        with e.when((args.only < 0) | unit.equals(args.only)):
            polls = e.variable(e.i64(0))
            with e.repeat_while() as again:
                polls.add(1)
                again.append((e.load_atomic(args.flag) < args.number) & (polls.get() < args.most))
            with e.when(e.load_atomic(args.flag) < args.number):
                e.add_atomic(args.late, e.i64(1))


COUNT = Kernel("test_count", emit_count, declared("counts total errors", "before"))
AWAIT = Kernel("test_await", emit_await, declared("flag late", "number only most"))


def launch(
    kernel: Kernel,
    units: int,
    grain: int,
    pointers: tuple[np.ndarray, ...],
    integers: tuple[int, ...],
    overlaps: int = 0,
) -> Launch:
    """A launch whose arguments live as long as the process."""
    arguments, code = kernel.pack(kernel.arguments(*pointers, *integers)), loaded(kernel, best())
    _kept.append((code, arguments, *pointers))
    return Launch(code.address, arguments.ctypes.data, units, grain, overlaps)


_kept: list[tuple[Any, ...]] = []


class Counted:
    """A command buffer of entries that count their units: most are short, one in a hundred is taken unit by unit.

    One in five overlaps the next one.
    """

    def __init__(self, seed: int, entries: int) -> None:
        rng = np.random.default_rng(seed)
        units, grains = rng.integers(0, 40, entries), rng.integers(1, 12, entries)
        units[50::100], grains[50::100] = 3000, 1
        overlaps = rng.random(entries) < 0.2
        self.total, self.errors = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.counts = [np.zeros(n, np.int64) for n in units]
        before = np.cumsum([0, *units])[:-1]  # the units of all entries before
        for entry in range(1, entries):
            if overlaps[entry - 1]:
                before[entry] = before[entry - 1]
        self._launches = [
            launch(COUNT, int(n), int(grain), (counts, self.total, self.errors), (int(done),), int(overlap))
            for n, grain, counts, done, overlap in zip(units, grains, self.counts, before, overlaps, strict=True)
        ]
        self.commands = CommandBuffer(self._launches)

    def run(self, threads: int, times: int = 1, on: Workers | None = None) -> None:
        for _ in range(times):
            self.total[0] = 0
            (on or workers()).run(self.commands, threads)

    def run_in_parts(self, threads: int, on: Workers, owner: int, size: int = 7) -> None:
        """As `run`, in buffers of `size` launches that are added to one run."""
        self.total[0] = 0
        first, *others = (
            CommandBuffer(self._launches[begin : begin + size]) for begin in range(0, len(self._launches), size)
        )
        on.begin(first, threads, owner)
        for commands in others:
            on.add(commands, owner)
        on.finish(owner)

    def check(self, times: int) -> None:
        """Each unit has run `times` times, after all units of the entries before it."""
        assert self.errors[0] == 0
        for counts in self.counts:
            np.testing.assert_array_equal(counts, times)


class Meeting:
    """A command buffer that ends well only if several threads run it at the same time.

    Its units wait for each other. entries: launches that these are shared out among; each overlaps the next one.
    """

    def __init__(self, threads: int, polls: int = POLLS, entries: int = 1) -> None:
        self._flag, self._late = np.zeros(1, np.int64), np.zeros(1, np.int64)
        given = (self._flag, self._late), (threads, -1, polls)
        self._commands = CommandBuffer([launch(AWAIT, threads // entries, 1, *given, 1) for _ in range(entries)])

    def takes_place(self, on: Workers, threads: int) -> bool:
        self._flag[0] = self._late[0] = 0
        on.run(self._commands, threads)
        return int(self._late[0]) == 0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.0005)


def field(on: Workers, offset: int) -> int:
    return int(on._state[offset : offset + 8].view(np.int64)[0])


def sleeping(on: Workers) -> list[int]:
    flags = on._state[module._SLEEP_FLAGS :].view(np.int64).copy()  # workers change the array meanwhile
    return np.flatnonzero(flags).tolist()


@pytest.fixture(scope="module")
def own() -> Workers:
    """Workers of these tests alone."""
    return Workers()


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
def test_each_unit_runs_once_after_all_units_of_the_entries_before(threads: int) -> None:
    counted = Counted(threads, 1000)
    counted.run(threads, times=10)
    counted.check(10)


@pytest.mark.parametrize("threads", [2, 3, 20])
def test_buffers_are_added_to_a_run_that_others_wait_for(threads: int) -> None:
    parts, whole = Counted(threads, 1000), Counted(0, 100)
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(lambda owner=owner, one=one: [one.run_in_parts(threads, workers(), owner) for _ in range(10)])
            for owner, one in ((1, parts), (2, Counted(1, 200)))
        ]
        runs.append(pool.submit(whole.run, threads, 100))
        for run in runs:
            run.result(PATIENCE)
    parts.check(10)
    whole.check(100)


def test_others_compute_what_has_begun_and_only_its_owner_adds_to_it(own: Workers) -> None:
    counts, total, errors = (np.zeros(size, np.int64) for size in (90, 1, 1))
    commands = CommandBuffer([launch(COUNT, 90, 1, (counts, total, errors), (0,))])
    own.begin(commands, 2, 5)
    until(lambda: int(total[0]) == 90)
    own.add(commands, 6)
    own.finish(6)
    own.add(commands, 5)
    own.finish(5)
    own.finish(5)  # as after an exception: there is nothing left of it
    own.run(commands, 2)
    assert (counts == 3).all()


def test_a_buffer_may_be_empty_and_its_units_may_change(own: Workers) -> None:
    own.run(CommandBuffer([]), 2)
    counts, total, errors = (np.zeros(size, np.int64) for size in (9, 1, 1))
    commands = CommandBuffer([launch(COUNT, 0, 2, (counts, total, errors), (0,))])
    for units in (0, 9, 4):
        commands.units[0] = units
        own.run(commands, 2)
    assert counts.tolist() == [2] * 4 + [1] * 5


def test_python_threads_run_their_buffers_at_the_same_time() -> None:
    buffers = [Counted(seed, 300) for seed in range(6)]
    with ThreadPoolExecutor(len(buffers)) as pool:
        runs = [pool.submit(commands.run, 1 + seed % 4, 30) for seed, commands in enumerate(buffers)]
        for run in runs:
            run.result(PATIENCE)
    for commands in buffers:
        commands.check(30)


def test_an_entry_begins_while_one_that_overlaps_it_runs(own: Workers) -> None:
    meeting = Meeting(4, entries=2)
    assert all(meeting.takes_place(own, 4) for _ in range(10))


def test_a_buffer_runs_on_no_more_threads_than_it_may(own: Workers) -> None:
    """Three workers exist; a command buffer for two threads does not get a third one to meet."""
    until(lambda: own.start(4) == 4)
    assert not Meeting(3, polls=100_000_000).takes_place(own, 2)


def test_a_suspended_thread_holds_up_only_the_units_it_has_taken(own: Workers) -> None:
    """The first unit ends when all others have: as if the system had suspended its thread until then."""
    flag, late, errors = (np.zeros(1, np.int64) for _ in range(3))
    counts = np.zeros(10, np.int64)
    commands = CommandBuffer(
        [launch(AWAIT, 64, 1, (flag, late), (63, 0, POLLS)), launch(COUNT, 10, 1, (counts, flag, errors), (63,))]
    )
    for run in range(1, 11):
        flag[0] = 0
        own.run(commands, 2)
        assert (late[0], errors[0]) == (0, 0)
        assert (counts == run).all()


def test_each_thread_begins_with_its_own_range_of_units(own: Workers) -> None:
    """The first unit of each thread waits for the other thread's first unit."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            e.store(e.load_atomic(args.flag), args.before + unit * 8)
            e.add_atomic(args.flag, e.i64(1))
            polls = e.variable(e.i64(0))
            with e.repeat_while() as again:
                polls.add(1)
                again.append((e.load_atomic(args.flag) < 2) & (polls.get() < args.most))

    flag, before = np.zeros(1, np.int64), np.zeros(11, np.int64)
    meet = Kernel("test_first_units", emit, declared("flag before", "most"))
    own.run(CommandBuffer([launch(meet, 11, 1, (flag, before), (POLLS,))]), 2)
    assert np.flatnonzero(before < 2).tolist() == [0, 6]


def test_a_thread_that_waits_long_offers_its_core() -> None:
    """Callers in other processes have no fair share of the CPUs otherwise, and both are half as fast."""
    own, offers = Workers(), []
    function = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: offers.append(1) or 0)
    place = own._state[module._OFFER_CORE :][:8].view(np.int64)
    kept, place[0] = int(place[0]), ctypes.cast(function, ctypes.c_void_p).value
    flag, late = np.zeros(1, np.int64), np.zeros(1, np.int64)
    waiting = CommandBuffer([launch(AWAIT, 1, 1, (flag, late), (1, 0, POLLS))])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own.run, waiting, 2)
        until(lambda: bool(offers))
        place[0], flag[0] = kept, 1
        call.result(PATIENCE)
    assert late[0] == 0


def test_idle_workers_sleep_and_wake_up_for_the_next_buffer(own: Workers) -> None:
    meeting = Meeting(4)
    for _ in range(5):
        assert meeting.takes_place(own, 4)
        until(lambda: sleeping(own) == [1, 2, 3])

    def cost_nothing() -> bool:
        before = time.process_time()
        time.sleep(0.1)
        return time.process_time() - before < 0.05

    until(cost_nothing)  # threads of earlier tests may still be at work


def test_workers_sleep_while_buffers_of_fewer_threads_run(own: Workers) -> None:
    """Runs that follow each other without a pause neither keep them awake nor wake them up."""
    meeting, counted = Meeting(4), Counted(5, 50)
    assert meeting.takes_place(own, 4)
    end = time.monotonic() + PATIENCE
    while not {2, 3} <= set(sleeping(own)):
        counted.run(2, on=own)
        assert time.monotonic() < end, "they do not sleep"
    for _ in range(200):
        counted.run(2, on=own)
        assert {2, 3} <= set(sleeping(own))
    assert meeting.takes_place(own, 4)


def test_workers_take_part_after_the_number_of_a_run_has_wrapped_around() -> None:
    own = Workers()
    own._state[module._RUN : module._RUN + 8].view(np.int64)[0] = module._NUMBERS - 2
    counted, meeting = Counted(0, 100), Meeting(2)
    for _ in range(5):
        assert meeting.takes_place(own, 2)
        counted.run(2, on=own)
    counted.check(5)
    assert field(own, module._RUN) < 10


def test_buffers_of_several_callers_run_in_order_of_arrival(own: Workers) -> None:
    """The first caller's command buffer waits for a flag; the others come one after another."""
    flag, late, order = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    places = np.zeros(5, np.int64)

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        e.store(e.load(args.order, I64), args.place)
        e.add_atomic(args.order, e.i64(1))

    take_place = Kernel("test_order", emit, declared("order place"))
    first = CommandBuffer([launch(AWAIT, 1, 1, (flag, late), (1, 0, POLLS))])
    buffers = [CommandBuffer([launch(take_place, 1, 1, (order, places[i:]), ())]) for i in range(5)]
    begun = field(own, module._NEXT_TICKET)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(own.run, first, 2)]
        until(lambda: field(own, module._NEXT_TICKET) == begun + 1)
        for number, commands in enumerate(buffers):
            calls.append(pool.submit(own.run, commands, 2))
            until(lambda number=number: field(own, module._NEXT_TICKET) == begun + 2 + number)
        assert order[0] == 0
        flag[0] = 1
        for call in calls:
            call.result(PATIENCE)
    assert late[0] == 0
    assert places.tolist() == [0, 1, 2, 3, 4]


def test_buffers_of_one_thread_run_at_the_same_time_with_memory_of_their_own(own: Workers) -> None:
    """Each waits for the other, and one of two threads waits for both. Then its scratch memory is as it left it."""

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        e.store(args.number, scratch)
        e.add_atomic(args.flag, e.i64(1))
        polls = e.variable(e.i64(0))
        with e.repeat_while() as again:
            polls.add(1)
            again.append((e.load_atomic(args.flag) < 3) & (polls.get() < args.most))
        with e.when((e.load_atomic(args.flag) < 3) | ~e.load(scratch, I64).equals(args.number)):
            e.add_atomic(args.wrong, e.i64(1))

    meet = Kernel("test_meet", emit, declared("flag wrong", "number most"))
    flag, wrong = np.zeros(1, np.int64), np.zeros(1, np.int64)
    buffers = [CommandBuffer([launch(meet, 1, 1, (flag, wrong), (number, POLLS))]) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(own.run, commands, threads) for commands, threads in zip(buffers, (2, 1, 1), strict=True)]
        for call in calls:
            call.result(PATIENCE)
    assert wrong[0] == 0


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_threads_that_cannot_be_started_are_done_without(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    own, start, tries = Workers(), threading.Thread.start, []

    def refused(thread: threading.Thread) -> None:
        tries.append(thread)
        if len(tries) > 1:
            raise error
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    counted = Counted(1, 200)
    counted.run(4, times=5, on=own)
    counted.check(5)
    assert own.start(4) == 2
    assert len(tries) == 2  # not tried at each run


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timer signals")
def test_a_buffer_is_completed_before_ctrl_c_is_raised(own: Workers) -> None:
    counted, times = Counted(2, 2000), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def run_until_interrupted(seconds: float) -> None:
        nonlocal times
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            times += 1
            counted.run(3, on=own)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(30):
            with pytest.raises(KeyboardInterrupt):
                run_until_interrupted(0.0005 + 0.0001 * number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    ran = set(map(int, np.concatenate(counted.counts)))
    assert len(ran) == 1, "a run was left in the middle"
    assert counted.errors[0] == 0
    assert times - 30 <= ran.pop() <= times  # the exception may come before a run begins
    counted.run(3, on=own)


@needs_fork
def test_a_child_forked_between_runs_has_its_own_workers(own: Workers) -> None:
    meeting, counted = Meeting(3), Counted(3, 500)
    counted.run(3, on=own)

    def work() -> bool:
        counted.run(3, times=3, on=own)
        counted.check(4)
        return meeting.takes_place(own, 3)

    child = begun_in_child(work)
    counted.run(3, times=2, on=own)
    assert child() is True
    counted.check(3)
    assert meeting.takes_place(own, 3)


@needs_fork
def test_a_child_forked_during_a_run_has_its_own_workers(own: Workers) -> None:
    flag, late = np.zeros(1, np.int64), np.zeros(1, np.int64)
    waiting = CommandBuffer([launch(AWAIT, 2, 1, (flag, late), (2, 0, POLLS))])
    meeting = Meeting(3)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own.run, waiting, 2)
        until(lambda: flag[0] == 1)  # all but the unit that waits
        child = begun_in_child(lambda: meeting.takes_place(own, 3))
        assert child() is True
        flag[0] = 2
        call.result(PATIENCE)
    assert late[0] == 0
    assert meeting.takes_place(own, 3)


def test_the_interpreter_ends_while_workers_and_other_threads_run() -> None:
    script = """
        import threading
        from tests.jit.test_workers import Counted
        begun = threading.Event()
        def forever():
            counted = Counted(0, 100)
            while True:
                counted.run(3)
                begun.set()
        threading.Thread(target=forever, daemon=True).start()
        counted = Counted(1, 100)
        counted.run(3, times=20)
        assert begun.wait(120)
        counted.check(20)
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
