"""The loop in which a kernel spends its time, as LLVM compiles it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("llvmlite")

from polarlm.engine.jit.compile.compiler import Kernel, assembly
from polarlm.engine.jit.isa.levels import LEVELS, Level
from tests.jit.levels import special_levels as special_levels

# Dot products of 4 bytes and of 2 words: the instructions that `byte_ops.dot4` and `dot2` exist for. Without VNNI bytes
# are multiplied as such where pairs of products fit 16 bits.
OF_SMALL_BYTES = {level.name: "vpdpbusd" if "vnni" in level.features else "vpmaddubsw" for level in LEVELS}
OF_BYTES = {level.name: "vpdpbusd" if "vnni" in level.features else "vpmaddwd" for level in LEVELS}
OF_WORDS = {level.name: "vpdpwssd" if "vnni" in level.features else "vpmaddwd" for level in LEVELS}

_VECTOR = re.compile("%[xyz]mm")


class Loop:
    """The innermost loop of a kernel with the most instructions on vectors, or, with `product`, that with the largest
    share of multiply-adds."""

    def __init__(self, kernel: Kernel, level: Level, *, product: bool = False) -> None:
        self._register = "%zmm" if level.lanes == 16 else "%ymm"
        lines = [line.split("#")[0].replace("{vex}", "").strip() for line in assembly(kernel, level).splitlines()]
        loops = [
            [line for line in lines[first : last + 1] if _VECTOR.search(line)] for first, last in _innermost(lines)
        ]
        # Short ones are what is left of longer ones.
        self._lines = max((loop for loop in loops if len(loop) > 7), key=_share_of_products if product else len)

    def __len__(self) -> int:
        """Instructions on vectors."""
        return len(self._lines)

    def count(self, instruction: str) -> int:
        """How many of the instructions have this name, a regular expression, and take the level's whole registers."""
        return sum(bool(re.match(rf"{instruction}\s", line)) and self._register in line for line in self._lines)

    @property
    def on_stack(self) -> int:
        """How many of the instructions read or write vectors on the stack for want of registers: at a fixed place."""
        return sum("(%rsp)" in line for line in self._lines)


def _innermost(lines: list[str]) -> list[tuple[int, int]]:
    """The first and the last line of each loop that has no other in it: a jump back, to a label."""
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
    jumps = ((re.match(r"j\w+\s+(\S+)$", line), number) for number, line in enumerate(lines))
    loops = [(labels[jump[1]], number) for jump, number in jumps if jump and labels.get(jump[1], number) < number]
    return [loop for loop in loops if not any(_is_in(other, loop) for other in loops)]


def _is_in(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _share_of_products(loop: list[str]) -> float:
    return sum(line.startswith("vfmadd") for line in loop) / len(loop)
