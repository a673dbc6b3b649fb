"""The machine that runs this process: which levels of CPU features it has, and which are permitted."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from polarlm.engine.errors import EngineError
from polarlm.engine.jit.isa import VARIABLE
from polarlm.engine.jit.isa.levels import LEVELS, Level

_CPUS = Path("/proc/cpuinfo")
# Names of Linux that are not LLVM's.
_LLVM_NAMES = {"abm": "lzcnt", "bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the features that both the CPU and the operating system support; none if they are not known.

    The system must save the wide registers when it switches threads. LLVM asks for that (XGETBV), and Linux does not
    list what it has not enabled, so features of AVX are missing where the CPU has them and the system, or a hypervisor,
    does not enable them.
    """
    listed = _listed_by_linux()
    return _known_to_llvm() if listed is None else frozenset(_LLVM_NAMES.get(name, name) for name in listed)


def _listed_by_linux() -> list[str] | None:
    """Names of the features of an x86 CPU, by Linux; None elsewhere."""
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

    Raises EngineError for a name that is no level of this machine.
    """
    here = levels()
    if not (name := os.environ.get(VARIABLE)):
        return here
    names = [level.name for level in here]
    if name not in names:
        raise EngineError(f"{VARIABLE}={name}: set it to one of this CPU's levels ({', '.join(names)}), or unset it")
    return here[: names.index(name) + 1]


def best() -> Level:
    """The highest level that this machine can run, and that POLARLM_CPU_LEVEL permits. Raises EngineError."""
    return permitted()[-1]
