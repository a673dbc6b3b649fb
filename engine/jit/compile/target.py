"""The machine that runs this process: the levels of CPU features that it has, and those that are permitted."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from polarlm.engine.errors import EngineError
from polarlm.engine.jit.isa import VARIABLE
from polarlm.engine.jit.isa.levels import LEVELS, Level

_CPUS = Path("/proc/cpuinfo")
# Features that Linux and LLVM name differently.
_LLVM_NAMES = {"abm": "lzcnt", "bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the features that both the CPU and the operating system support; empty if they are unknown.

    The system must save wide registers when it switches threads. LLVM checks that (XGETBV), and Linux lists only what
    it has enabled, so AVX features are missing where the system or a hypervisor has not enabled them.
    """
    listed = _listed_by_linux()
    return _known_to_llvm() if listed is None else frozenset(_LLVM_NAMES.get(name, name) for name in listed)


def _listed_by_linux() -> list[str] | None:
    """Linux's names of the features of an x86 CPU; None elsewhere."""
    try:
        with _CPUS.open(encoding="ascii", errors="replace") as lines:
            return next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), None)
    except OSError:
        return None


def _known_to_llvm() -> frozenset[str]:
    import llvmlite.binding as llvm

    try:
        return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)
    except RuntimeError:
        return frozenset()


def levels() -> list[Level]:
    """The levels that this machine can run, in ascending order."""
    return [level for level in LEVELS if host_features().issuperset(level.needs)]


def permitted() -> list[Level]:
    """The levels that this machine can run, up to the one that POLARLM_CPU_LEVEL names, in ascending order.

    Raises EngineError if the variable names no level of this machine.
    """
    here = levels()
    if not (name := os.environ.get(VARIABLE)):
        return here
    names = [level.name for level in here]
    if name not in names:
        raise EngineError(f"{VARIABLE}={name}: set it to one of this CPU's levels ({', '.join(names)}), or unset it")
    return here[: names.index(name) + 1]


def best() -> Level:
    """The highest level that this machine can run and that POLARLM_CPU_LEVEL permits. Raises EngineError."""
    return permitted()[-1]
