"""Levels of CPU features that kernels are compiled for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polarlm.engine.errors import EngineError

VARIABLE = "POLARLM_CPU_LEVEL"  # restricts the level, for measurements and tests

_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Level:
    """A set of CPU features that kernels may use.

    cpu, features: of LLVM's target. needs: the features that the host must have.
    lanes: 32-bit numbers in a register. registers: of vectors.
    """

    name: str
    cpu: str
    needs: tuple[str, ...] = ()
    lanes: int = 4
    registers: int = 16

    @property
    def features(self) -> str:
        """Features and preferences for LLVM: all lanes, and one instruction for a dot product rather than two."""
        wishes = ["-prefer-256-bit"] if self.lanes == 16 else []
        wishes += ["+fast-dpwssd"] if self.has("avx512vnni") or self.has("avxvnni") else []
        return ",".join([*(f"+{name}" for name in self.needs), *wishes])

    def has(self, feature: str) -> bool:
        return feature in self.needs


# In ascending order. A level is a subset of every later one, except for avx2-vnni.
LEVELS = (
    Level("generic", ""),
    Level("avx2", "x86-64-v3", _AVX2, 8),
    Level("avx2-vnni", "x86-64-v3", (*_AVX2, "avxvnni"), 8),
    Level("avx512", "x86-64-v4", _AVX512, 16, 32),
    Level("avx512-vnni", "x86-64-v4", (*_AVX512, "avx512vnni"), 16, 32),
    Level("avx512-vbmi", "x86-64-v4", (*_AVX512, "avx512vnni", "avx512vbmi"), 16, 32),
)


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
