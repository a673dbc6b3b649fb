"""Callers of kernels that want the same CPUs: each gets a fair share, and waiting for each other costs little.

Throughput is counted in runs per second of CPU time, and compared with turns of a moment ago: what other programs take
of the machine then changes little. Callers with two threads each, on two CPUs, have turns with callers of one thread
each, which wait for nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.compiled import end_of_compilation
from tests.jit.levels import declared, loaded
from tests.requests.test_forks import begun_in_child

from polarlm.engine.jit.compile.compiler import Kernel  # isort: skip
from polarlm.engine.backends.native.thread_count import allowed_cpus
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector
from polarlm.engine.jit.run.workers import CommandBuffer, Launch, Workers

ENTRIES, UNITS, TIMES, FLOATS = 300, 64, 16, 512  # a run takes a few milliseconds, and an entry ten microseconds
TURN = 0.25  # seconds of a turn
# There are at least 5 turns, and as many more as it takes until all of them together are fair: on a busy machine a turn
# has few runs, and which caller they are of is the system's choice. Callers that are unfair stay so in any number.
TURNS, MOST_TURNS = 5, 60
# Limits for a busy machine. Measured: shares of 0.83 to 1.0 of the other's, and rates of 0.79 to 1.01 of those without
# waiting. Rates are 0.44 where threads of two processes never offer their CPU, 0.59 where callers poll for a turn.
SHARE, RATE = 0.4, 0.65
PATIENCE = 60  # seconds until a test that hangs fails

needs_two_cpus = pytest.mark.skipif(len(allowed_cpus()) < 2, reason="threads share two CPUs; this process may use one")
needs_processes = pytest.mark.skipif(
    not hasattr(os, "fork") or not hasattr(os, "sched_setaffinity"),
    reason="this system has no fork, or does not restrict a process to CPUs",
)


def emit_dots(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
    """Unit by unit, the sum of the squares of x, `TIMES` times; y (units, 16)."""
    lanes = vector(F32, 16)
    with e.loop(begin, end) as unit:
        total = e.variable(e.zero(lanes))
        with e.loop(0, TIMES), e.loop(0, 4 * FLOATS, 64) as at:
            part = e.load(args.x + at, lanes)
            total.set(part * part + total.get())
        e.store(total.get(), args.y + unit * 64)


class Player:
    """A caller that runs command buffers of dot products, again and again."""

    def __init__(self) -> None:
        x, self.sums = np.ones(FLOATS, np.float32), np.zeros((UNITS, 16), np.float32)
        kernel = Kernel("test_dots", emit_dots, declared("x y"))
        self._code, arguments = loaded(kernel, best()), kernel.pack(kernel.arguments(x, self.sums))
        self._keep = x, arguments
        self._commands = {
            threads: CommandBuffer(
                [Launch(self._code.address, arguments.ctypes.data, UNITS, UNITS // (8 * threads))] * ENTRIES
            )
            for threads in (1, 2)
        }

    def runs(self, on: Workers, threads: int, begin: float, seconds: float) -> int:
        """Runs from the time `begin` on, on so many threads."""
        self.sums[:] = 0
        number, end = 0, begin + seconds
        time.sleep(max(0, begin - time.monotonic()))
        while time.monotonic() < end:
            on.run(self._commands[threads], threads)
            number += 1
        assert number == 0 or (self.sums == TIMES * FLOATS / 16).all()
        return number


class Turn(NamedTuple):
    """The runs of two callers at the same time, and the seconds of CPU time that both took."""

    runs: tuple[int, int]
    cpu: float


def unfair(waiting: Sequence[Turn], alone: Sequence[Turn]) -> str:
    """Whether one of two callers lacks its share, or both together waste much compared with callers that never wait, in
    words; empty if neither."""
    first, second = (sum(turn.runs[i] for turn in waiting) for i in (0, 1))
    if min(first, second) <= SHARE * max(first, second):
        return f"shares: {first} and {second} runs"
    rates = [
        sum(map(sum, (turn.runs for turn in turns))) / sum(turn.cpu for turn in turns) for turns in (waiting, alone)
    ]
    return "" if rates[0] > RATE * rates[1] else f"runs per second of CPU time: {rates[0]:.0f}, alone {rates[1]:.0f}"


def assert_fair(turn: Callable[[int], Turn]) -> None:
    """turn: number of threads → a turn of two callers, each with as many."""
    waiting, alone, wrong = [], [], "no turn"
    while wrong and len(waiting) < MOST_TURNS:
        waiting.append(turn(2))
        alone.append(turn(1))
        wrong = unfair(waiting, alone) if len(waiting) >= TURNS else "too few turns"
    assert not wrong, wrong


@pytest.mark.slow  # seconds of turns, and other programs in them
@needs_two_cpus
@needs_processes
def test_two_processes_have_fair_shares_of_two_cpus() -> None:
    end_of_compilation()
    player = Player()
    cpus = sorted(allowed_cpus())[:2]

    def play(threads: int, number: int, is_ready: mmap) -> tuple[int, float]:
        os.sched_setaffinity(0, cpus)
        own = Workers()
        own.start(threads)
        is_ready[number] = 1
        while not all(is_ready[:2]):  # a busy machine forks one long before the other
            time.sleep(0.001)
        cpu = time.process_time()
        return player.runs(own, threads, time.monotonic() + 0.01, TURN), time.process_time() - cpu

    def turn(threads: int) -> Turn:
        is_ready = mmap(-1, 2)  # shared with children
        children = [begun_in_child(partial(play, threads, number, is_ready)) for number in range(2)]
        (first, cpu), (second, more) = (child() for child in children)
        return Turn((first, second), cpu + more)

    assert_fair(turn)
