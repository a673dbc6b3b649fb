"""Levels of CPU features that kernels are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Level:
    """A set of CPU features that kernels may use. Kernels ask what it can do, and never for a feature's name.

    cpu, features: of LLVM's target. needs: the features that the host must have.
    lanes: 32-bit numbers in a register. registers: of vectors. sums: vectors of 16 numbers that stay in registers
    beside what is multiplied for them.
    """

    name: str
    cpu: str
    needs: tuple[str, ...] = ()
    lanes: int = 4
    registers: int = 16
    sums: int = 2

    @property
    def features(self) -> str:
        """Features and preferences for LLVM: all lanes, and one instruction for a dot product rather than two."""
        wishes = ["-prefer-256-bit"] if self.lanes == 16 else []
        wishes += ["+fast-dpwssd"] if self.adds_dot_products else []
        return ",".join([*(f"+{name}" for name in self.needs), *wishes])

    @property
    def fuses(self) -> bool:
        """Whether a product and a sum of floats are one instruction, with one rounding."""
        return self.has("fma")

    @property
    def converts_halves(self) -> bool:
        """Whether there are instructions from float16 to float32 and back."""
        return self.has("f16c")

    @property
    def byte_register(self) -> int:
        """Bytes of the registers that instructions on bytes and words take; 0 if kernels do without such ones."""
        return 4 * self.lanes if self.has("avx2") else 0

    @property
    def adds_dot_products(self) -> bool:
        """Whether dot products of 4 bytes or 2 words, and their sum with a total, are one instruction."""
        return self.has("avx512vnni") or self.has("avxvnni")

    @property
    def wide_tables(self) -> bool:
        """Whether one instruction looks up 64 or 128 bytes. It ignores the bits of an index above."""
        return self.has("avx512vbmi")

    def has(self, feature: str) -> bool:
        """Whether the host must have a feature, by LLVM's name."""
        return feature in self.needs


# In ascending order. A level is a subset of every later one, except for avx2-vnni.
LEVELS = (
    Level("generic", ""),
    Level("avx2", "x86-64-v3", _AVX2, 8, sums=3),
    Level("avx2-vnni", "x86-64-v3", (*_AVX2, "avxvnni"), 8, sums=3),
    Level("avx512", "x86-64-v4", _AVX512, 16, 32, 8),
    Level("avx512-vnni", "x86-64-v4", (*_AVX512, "avx512vnni"), 16, 32, 8),
    Level("avx512-vbmi", "x86-64-v4", (*_AVX512, "avx512vnni", "avx512vbmi"), 16, 32, 8),
)
