"""The machine that runs this process: the levels of CPU features that it has, and those that are permitted."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

from polarlm.engine.errors import EngineError
from polarlm.engine.jit.isa import VARIABLE
from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.lang import Level

_CPUS = Path("/proc/cpuinfo")
# Features that Linux and LLVM name differently.
_LLVM_NAMES = {"abm": "lzcnt", "bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}
_LLVM_NAMES |= {"avx512_bf16": "avx512bf16", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8"}
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # Linux's numbers on x86-64: ARCH_REQ_XCOMP_PERM


# AArch64: LLVM's name → the number of the auxiliary vector's entry and the bit in it (Linux, asm/hwcap.h), and the
# name of macOS. Every AArch64 CPU that these systems run on has `neon`.
_HWCAP, _HWCAP2 = 16, 26
_ARM_FEATURES = {
    "dotprod": (_HWCAP, 20, "hw.optional.arm.FEAT_DotProd"),
    "i8mm": (_HWCAP2, 13, "hw.optional.arm.FEAT_I8MM"),
}


def machine() -> str:
    """LLVM's name of the kind of CPU that runs this process: x86_64, aarch64, or what the system calls another."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the features that both the CPU and the operating system support; empty if they are unknown.

    The system must save wide registers when it switches threads. LLVM checks that (XGETBV), and Linux lists only what
    it has enabled, so AVX features are missing where the system or a hypervisor has not enabled them. On AArch64 the
    features come from the system: LLVM would read /proc/cpuinfo, which under an emulator describes the host.
    """
    if machine() == "aarch64":
        ask = {"linux": _linux_has, "darwin": _macos_has}.get(sys.platform, lambda name: False)
        return frozenset({"neon", *(name for name in _ARM_FEATURES if ask(name))})
    names_of_linux = _linux_features()
    return (
        _llvm_features()
        if names_of_linux is None
        else frozenset(_LLVM_NAMES.get(name, name) for name in names_of_linux)
    )


def _linux_has(name: str) -> bool:
    """Whether the kernel says that an AArch64 CPU has a feature."""
    entry, bit, _ = _ARM_FEATURES[name]
    read = ctypes.CDLL(None).getauxval
    read.restype, read.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return bool(read(entry) >> bit & 1)


def _macos_has(name: str) -> bool:
    """The same of macOS, which does not know the names of features that are newer than itself."""
    flag, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    read = ctypes.CDLL(None).sysctlbyname
    read.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3, ctypes.c_size_t]
    failed = read(_ARM_FEATURES[name][2].encode(), ctypes.byref(flag), ctypes.byref(size), None, 0)
    return not failed and flag.value == 1


def _linux_features() -> list[str] | None:
    """Linux's names of the features of an x86 CPU; None elsewhere."""
    try:
        with _CPUS.open(encoding="ascii", errors="replace") as lines:
            return next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), None)
    except OSError:
        return None


@cache
def _may_use_tiles() -> bool:
    """Whether Linux lets this process use AMX. A process has to ask, since a signal then saves 8 KiB more. Linux
    refuses where a thread has a stack for signals that is too small."""
    return sys.platform == "linux" and not ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)


def _llvm_features() -> frozenset[str]:
    import llvmlite.binding as llvm

    try:
        return frozenset(name for name, is_supported in llvm.get_host_cpu_features().items() if is_supported)
    except RuntimeError:
        return frozenset()


def levels() -> list[Level]:
    """The levels that this machine can run, in ascending order."""
    possible = [level for level in LEVELS if level.machine in ("", machine())]
    runnable = [level for level in possible if host_features().issuperset(level.needs)]
    return [level for level in runnable if "amx-tile" not in level.needs or _may_use_tiles()]


def permitted_levels() -> list[Level]:
    """The levels that this machine can run, up to the one that POLARLM_CPU_LEVEL names, in ascending order.

    Raises EngineError if the variable names no level of this machine.
    """
    levels_here = levels()
    if not (name := os.environ.get(VARIABLE)):
        return levels_here
    names = [level.name for level in levels_here]
    if name not in names:
        raise EngineError(f"{VARIABLE}={name}: set it to one of this CPU's levels ({', '.join(names)}), or unset it")
    return levels_here[: names.index(name) + 1]


def best() -> Level:
    """The highest level that this machine can run and that POLARLM_CPU_LEVEL permits. Raises EngineError."""
    return permitted_levels()[-1]
