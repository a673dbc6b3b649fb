"""The number of threads of compiled kernels: settings, variables, cores, and the CPUs that the process may use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from polarlm.engine import Engine, SamplingParams
from polarlm.engine.backends.native import thread_count as counting
from polarlm.engine.backends.native.ops import NativeOps
from polarlm.engine.backends.native.thread_count import VARIABLES, allowed_cpus, core_count, cpu_quota, thread_count
from polarlm.engine.backends.numpy import blas
from polarlm.engine.jit.run import workers as working
from polarlm.engine.jit.run.workers import Workers
from polarlm.engine.outputs import Threads
from tests.backends.numpy.test_host_memory import tree

ROOT = Path(__file__).resolve().parents[3]
V1_LINES = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n"


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, object]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),  # rounded up: a thread may run for a part of the time
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
        ("0::/user/app\n", {"user/app/cpu.max": "400000 100000", "user/cpu.max": "50000 25000"}, 2),  # the tightest
        (V1_LINES, v1("cpu,cpuacct/docker/abc", 200_000), 2),
        (V1_LINES, {**v1("cpu/docker/abc", -1), **v1("cpu", 100_000)}, 1),
        (V1_LINES, {"cpu/docker/abc/cpu.cfs_quota_us": 100_000}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_quota_of_the_groups_counts(
    tmp_path: Path, groups: str, files: dict[str, object], quota: int | None
) -> None:
    """tests/backends/numpy/test_host_memory.py has more trees of groups."""
    assert cpu_quota(tree(tmp_path, groups, files)) == quota


def hyperthreads(root: Path, siblings: dict[int, str]) -> Path:
    """`root` with the topology of these CPUs."""
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n", encoding="ascii")
    return root


PAIRS = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="the topology is read from /sys on Linux alone")


@linux
@pytest.mark.parametrize(("cpus", "number"), [(range(8), 4), ({0, 4}, 1), ({0, 1, 4}, 2), ({3, 8, 9}, 3)])
def test_hyperthreads_of_a_core_count_once(tmp_path: Path, cpus: set[int], number: int) -> None:
    assert core_count(set(cpus), hyperthreads(tmp_path, PAIRS)) == number


@linux
def test_a_system_that_tells_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    assert core_count({0, 1, 5}, tmp_path) == 3
    assert core_count({0, 1}, hyperthreads(tmp_path, {0: "", 1: ""})) == 2


@pytest.mark.parametrize(("system", "known", "number"), [("darwin", 4, 4), ("win32", 8, 6), ("darwin", None, 6)])
def test_other_systems_are_asked_for_their_cores(monkeypatch, system: str, known: int | None, number: int) -> None:
    monkeypatch.setattr(counting.sys, "platform", system)
    monkeypatch.setattr(counting.psutil, "cpu_count", lambda logical: known)
    assert core_count(set(range(6))) == number


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root folder of a machine with four cores of two hyperthreads each. This process may use all of them."""
    monkeypatch.setattr(counting.sys, "platform", "linux")
    monkeypatch.setattr(counting, "allowed_cpus", lambda: set(range(8)))
    return hyperthreads(tree(tmp_path, "0::/\n", {}), PAIRS)


def limited(machine: Path, quota: str) -> None:
    (machine / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    (machine / "sys/fs/cgroup/cpu.max").write_text(quota, encoding="ascii")


def test_there_is_a_thread_for_each_core_that_the_quota_allows(machine: Path) -> None:
    assert thread_count(0, machine, {}) == Threads(4, "one for each core that this process may use")
    limited(machine, "250000 100000")
    assert thread_count(0, machine, {}) == Threads(3, "this process may use 3 CPUs at a time")
    limited(machine, "100000 100000")
    assert thread_count(0, machine, {}) == Threads(1, "this process may use 1 CPU at a time")
    limited(machine, "600000 100000")
    assert thread_count(0, machine, {}).number == 4


def test_a_setting_is_obeyed_up_to_the_cpus(machine: Path) -> None:
    for number in (1, 4, 6, 8):
        assert thread_count(number, machine, {"OMP_NUM_THREADS": "2"}) == Threads(number, "by the setting threads")
    why = "by the setting threads 9, but this process may use 8 CPUs"
    assert thread_count(9, machine, {}) == Threads(8, why)
    limited(machine, "200000 100000")
    why = "by the setting threads 8, but this process may use 2 CPUs"
    assert thread_count(8, machine, {}) == Threads(2, why)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_is_obeyed_up_to_the_cpus(machine: Path, name: str) -> None:
    assert thread_count(0, machine, {name: "3"}) == Threads(3, f"by {name}")
    assert thread_count(0, machine, {name: "64"}) == Threads(8, f"by {name} 64, but this process may use 8 CPUs")


def test_the_first_variable_with_a_number_counts(machine: Path) -> None:
    for environment, number in [
        ({"OMP_NUM_THREADS": "6,2"}, 6),
        ({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "3"}, 2),
        ({"OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "0"}, 4),
        ({"OMP_NUM_THREADS": "all"}, 4),
    ]:
        assert thread_count(0, machine, environment).number == number


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not restrict a process to CPUs")
def test_a_process_restricted_to_one_cpu_has_one_thread() -> None:
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from polarlm.engine.backends.native.ops import NativeOps\n"
        "for threads in (0, 3): print(NativeOps(threads).threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    unset, three = done.stdout.splitlines()
    assert re.match(r"Threads\(number=1, why='(one for each core that|this process may use 1 CPU)", unset)
    assert three.startswith("Threads(number=1, why='by the setting threads 3, but this process may use 1 CPU; kernels")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch):
    """A machine with four CPUs; BLAS has its threads again afterwards."""
    monkeypatch.setattr(counting, "allowed_cpus", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(counting, "cpu_quota", lambda root: None)
    before = blas.threads()
    yield
    blas.use_threads(before)


def test_the_workers_of_an_engine_are_as_many_as_it_says(wide: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Workers()
    monkeypatch.setattr(working, "_instances", [started])
    for setting, number in ((1, 1), (3, 3), (64, 4)):
        assert NativeOps(setting).threads().number == number
        assert started._number == number - 1


def test_a_system_that_starts_no_more_threads_is_named(wide: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "_instances", [Workers()])

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", refused)
        threads = NativeOps(3).threads()
    assert threads.number == 1
    assert threads.why.startswith("by the setting threads: 3, of which the system starts no more; kernels compiled for")


def test_an_engine_says_that_it_has_fewer_threads_than_asked_for(tiny_path: Path) -> None:
    before, cpus = blas.threads(), len(allowed_cpus())
    try:
        with Engine.load(tiny_path, device="cpu", threads=cpus + 6, calibration=False) as engine:
            engine.generate([7, 8], SamplingParams(max_tokens=2))
            threads, of_blas = engine.status().threads, blas.threads()
    finally:
        blas.use_threads(before)
    assert 1 <= threads.number == of_blas <= cpus
    assert f"by the setting threads {cpus + 6}, but this process may use {threads.number} CPU" in threads.why
