"""The number of threads that kernels run on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Set
from pathlib import Path

import psutil

from polarlm.engine.backends.numpy.host_memory import groups
from polarlm.engine.outputs import Threads

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def thread_count(setting: int, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Threads:
    """The number of threads, and why.

    setting: the setting `threads`, 0 if unset. Then the variables of BLAS decide, and without these there is one thread
    per core, since its hyperthreads share the multipliers. Never more than the CPUs that this process may use: threads
    wait for each other after every kernel, and one without a CPU would hold up the others. root: the folder with `proc`
    and `sys`.
    """
    cpus = allowed_cpus()
    quota = cpu_quota(root)
    most = len(cpus) if quota is None else min(len(cpus), quota)
    requested, why = (setting, "the setting threads") if setting else _from_variable(environment)
    if requested > most:
        return Threads(most, f"by {why} {requested}, but this process may use {_cpus(most)}")
    if requested:
        return Threads(requested, f"by {why}")
    cores = core_count(cpus, root)
    if cores > most:
        return Threads(most, f"this process may use {_cpus(most)} at a time")
    return Threads(cores, "one for each core that this process may use")


def allowed_cpus() -> set[int]:
    """The numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    if sys.platform == "win32":
        return set(psutil.Process().cpu_affinity())
    return set(range(os.cpu_count() or 1))


def core_count(cpus: Set[int], root: Path = Path("/")) -> int:
    """The number of cores of these CPUs; a CPU whose topology is unknown counts as a core."""
    if sys.platform != "linux":
        return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))
    cores = set()
    for cpu in cpus:
        file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(file.read_text(encoding="ascii").strip() or str(cpu))
        except (OSError, ValueError):
            cores.add(str(cpu))
    return len(cores)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """The tightest CPU quota of this process's cgroups in CPUs, rounded up; None without a quota."""
    quotas = []
    for version, folder in groups(root, "cpu"):
        names = ["cpu.max"] if version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        try:  # both in microseconds
            texts = " ".join((folder / name).read_text(encoding="ascii") for name in names)
            limit, period = map(int, texts.split())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        if limit > 0 and period > 0:  # version 1 says −1 for no limit
            quotas.append(-(-limit // period))
    return min(quotas, default=None)


def _from_variable(environment: Mapping[str, str]) -> tuple[int, str]:
    """The thread count in the first variable that is set, and that variable's name; (0, "") if none is.

    A list has a count for each level of nested parallelism; the first one counts.
    """
    for name in VARIABLES:
        first = environment.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first):
            return int(first), name
    return 0, ""


def _cpus(number: int) -> str:
    return "1 CPU" if number == 1 else f"{number} CPUs"
