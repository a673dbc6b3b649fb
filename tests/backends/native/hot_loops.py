"""The loops in which CPU kernels spend their time, as LLVM compiles them for a level, and what they should have."""

from __future__ import annotations

import re
from typing import NamedTuple

from polarlm.engine.jit.isa.levels import LEVELS
from polarlm.engine.jit.lang import Kernel, Level
from tests.jit.levels import assembly
from tests.jit.levels import special_levels as special_levels

X86 = [level for level in LEVELS if level.machine == "x86_64"]
ARM = [level for level in LEVELS if level.machine == "aarch64"]

# Dot products of 4 bytes and of 2 words: the instructions that `Level.dot4` and `dot2` exist for. Without VNNI bytes
# are multiplied as such where pairs of products fit 16 bits.
OF_SMALL_BYTES = {level.name: "vpdpbusd" if "vnni" in level.features else "vpmaddubsw" for level in X86}
OF_BYTES = {level.name: "vpdpbusd" if "vnni" in level.features else "vpmaddwd" for level in X86}
OF_WORDS = {level.name: "vpdpwssd" if "vnni" in level.features else "vpmaddwd" for level in X86}


class _Syntax(NamedTuple):
    """How a machine's assembly looks. Regular expressions, but for the mark of comments."""

    comment: str
    jump: str  # to a label, which it captures
    vector: str  # a vector register, or a float's
    stack: str  # a place on the stack
    spill: str  # a write of a register to the stack
    multiply_add: str


_SYNTAX = {
    "x86_64": _Syntax("#", r"j\w+\s+(\S+)$", "%[xyz]mm", r"\(%rsp\)", r"\(%rsp\)$", "vfmadd"),
    "aarch64": _Syntax(
        "//", r"(?:b|b\.\w+|cbn?z|tbn?z)\s(?:.*\s)?(\.L\w+)$", r"\b[vqds]\d", r"\[sp\b", r"^st.*\[sp\b", "fmla"
    ),
}


class Loop:
    """The innermost loop of a kernel with the most instructions on vectors, or that with the largest share of an
    instruction: `share_of`, or with `product` multiply-adds."""

    def __init__(self, kernel: Kernel, level: Level, *, product: bool = False, share_of: str = "") -> None:
        self._syntax = syntax = _SYNTAX[level.machine]
        wanted = syntax.multiply_add if product else share_of
        self._register = {16: "%zmm", 8: "%ymm", 4: r"\.(16b|8h|4s|2d)\b"}[level.lanes]
        lines = _lines(kernel, level)
        loops = [
            [line for line in lines[first : last + 1] if re.search(syntax.vector, line)]
            for first, last in _innermost(lines, syntax.jump)
        ]
        # Short ones are what is left of longer ones.
        self._lines = max(
            (loop for loop in loops if len(loop) > 7), key=lambda loop: _share(loop, wanted) if wanted else len(loop)
        )

    def __len__(self) -> int:
        """Instructions on vectors."""
        return len(self._lines)

    def count(self, instruction: str) -> int:
        """How many of the instructions have this name, a regular expression, and take the level's whole registers."""
        return sum(
            bool(re.match(rf"(?:{instruction})\s", line) and re.search(self._register, line)) for line in self._lines
        )

    @property
    def on_stack(self) -> int:
        """How many of the instructions read or write vectors on the stack for want of registers: at a fixed place."""
        return sum(bool(re.search(self._syntax.stack, line)) for line in self._lines)

    @property
    def spilled(self) -> int:
        """How many of the instructions write vectors to the stack. What others read there never changes in the loop."""
        return sum(bool(re.search(self._syntax.spill, line)) for line in self._lines)


def _lines(kernel: Kernel, level: Level) -> list[str]:
    text = assembly(kernel, level).replace("{vex}", "")
    return [line.split(_SYNTAX[level.machine].comment)[0].strip() for line in text.splitlines()]


def _innermost(lines: list[str], jump: str) -> list[tuple[int, int]]:
    """The first and the last line of each loop that has no other in it: a jump back, to a label."""
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
    jumps = ((re.match(jump, line), number) for number, line in enumerate(lines))
    loops = [(labels[match[1]], number) for match, number in jumps if match and labels.get(match[1], number) < number]
    return [loop for loop in loops if not any(_is_in(other, loop) for other in loops)]


def _is_in(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _share(loop: list[str], instruction: str) -> float:
    return sum(line.startswith(instruction) for line in loop) / len(loop)
