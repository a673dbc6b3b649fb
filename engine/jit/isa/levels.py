"""Levels of CPU features that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

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
