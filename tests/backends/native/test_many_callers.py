"""Engines with different numbers of threads, in many Python threads at once, and children forked meanwhile."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.native import thread_count as counting
from polarlm.engine.backends.native.ops import NativeOps
from tests.jit.test_workers import Counted
from tests.programs import ROOT
from tests.requests.test_forks import begun_in_child
from tests.tiny import load_tiny

CALLERS, COUNTERS, TIMES, FORKS = 6, 2, 3, 4
PATIENCE = 60  # seconds until a test that hangs fails
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(engine: Engine, number: int) -> list[int]:
    return engine.generate(list(range(5 + number, 40 + 2 * number)), PARAMS).token_ids


def crowd(path: Path) -> None:
    """Six threads have an engine each, of one to four threads, and get the answers that they get alone; so does a child
    that is forked meanwhile, of an engine that computes nothing then. Two threads count units, so that kernels always
    run."""
    faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
    counting.allowed_cpus = lambda: {0, 1, 2, 3}
    counting.cpu_quota = lambda root: None
    with ExitStack() as stack:
        engines = []
        for number in range(CALLERS + 1):
            settings = {"cache_type": ("f16", "ring4")[number % 2], "block_size": 32, "calibration": False}
            engines.append(stack.enter_context(load_tiny(path, ops=NativeOps(1 + number % 4), **settings)))
        assert {engine.status().threads.number for engine in engines} == {1, 2, 3, 4}
        alone = [answer(engine, number) for number, engine in enumerate(engines)]
        stop = threading.Event()

        def call(number: int) -> None:
            times = 0
            while times < TIMES or not stop.is_set():
                assert answer(engines[number], number) == alone[number]
                times += 1

        def count(seed: int) -> None:
            counted, times = Counted(seed, 200), 0
            while times < TIMES or not stop.is_set():
                counted.run(3 + seed)
                times += 1
            counted.check(times)

        with ThreadPoolExecutor(CALLERS + COUNTERS) as pool:
            calls = [pool.submit(call, number) for number in range(CALLERS)]
            calls += [pool.submit(count, seed) for seed in range(COUNTERS)]
            try:
                for _ in range(FORKS if hasattr(os, "fork") else 0):
                    child = begun_in_child(lambda: answer(engines[-1], CALLERS))
                    assert child() == alone[-1]
            finally:
                stop.set()
            for made in calls:
                made.result(PATIENCE)
    print("done")


@pytest.mark.slow
def test_nothing_aborts_hangs_or_changes_when_many_threads_call(tiny_path: Path) -> None:
    """In a process of its own, which a fault would end."""
    module = "tests.backends.native.test_many_callers"
    script = f"import sys; from pathlib import Path; from {module} import crowd; crowd(Path(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(tiny_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
