"""The instructions of compiled kernels, from nvdisasm's text. No GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from polarlm.engine.errors import EngineError

_FUNCTION = re.compile(r"^\.text\.(?P<kernel>\w+):$")
_LABEL = re.compile(r"^(?P<label>\.L_\w+):$")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """An instruction. target: the offset that a branch jumps to."""

    offset: int
    opcode: str
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without modifiers: "LDG" of "LDG.E.128"."""
        return self.opcode.split(".")[0]

    def is_product(self) -> bool:
        """Whether tensor cores compute it: 16 × 8 × 16 numbers of a warp."""
        return self.name == "HMMA"

    def is_multiplication(self) -> bool:
        return self.name in ("FFMA", "FFMA2")

    def is_wide_load(self) -> bool:
        """Whether it loads 16 bytes per lane from global memory."""
        return self.name == "LDG" and ".128" in self.opcode


Loop = Sequence[Instruction]


def count(loop: Loop, is_counted: Callable[[Instruction], bool] | str) -> int:
    """The number of instructions for which `is_counted` holds, or that have this name."""
    return sum(i.name == is_counted if isinstance(is_counted, str) else is_counted(i) for i in loop)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. instructions: in order of their offsets."""

    name: str
    instructions: Loop

    def loops(self) -> Iterator[Loop]:
        """Yields all loops: instructions from the target of a backward branch to that branch. Loops may be nested."""
        for first, last in sorted({(i.target, i.offset) for i in self.instructions if i.target is not None}):
            if first < last:
                yield [i for i in self.instructions if first <= i.offset <= last]

    def hot_loop(self, *works: Callable[[Instruction], bool]) -> Loop:
        """The innermost loop with the most instructions of the first kind in `works` that any loop has.

        Raises AssertionError if there is no such loop.
        """
        for is_work in works or (Instruction.is_product, Instruction.is_wide_load):
            working = [loop for loop in self.loops() if count(loop, is_work)]
            inner = [a for a in working if not any(_within(b, a) for b in working)]
            if inner:
                return max(inner, key=lambda loop: (count(loop, is_work), len(loop)))
        raise AssertionError(f"{self.name} has no loop over loads or products: its instructions cannot be counted")


def _within(inner: Loop, outer: Loop) -> bool:
    """Whether `outer` contains `inner` and is longer."""
    return len(inner) < len(outer) and outer[0].offset <= inner[0].offset and inner[-1].offset <= outer[-1].offset


def parse(text: str) -> dict[str, Kernel]:
    """Name → kernel, for the kernels in nvdisasm's output."""
    kernels: dict[str, Kernel] = {}
    lines: list[tuple[Instruction, str | None]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    name = ""

    def finish() -> None:
        if lines:
            kernels[name] = Kernel(name, [replace(i, target=labels.get(label or "")) for i, label in lines])

    for line in text.splitlines():
        if function := _FUNCTION.match(line):
            finish()
            name, lines, labels, waiting = function["kernel"], [], {}, []
        elif label := _LABEL.match(line):
            waiting.append(label["label"])
        elif match := _INSTRUCTION.match(line):
            offset = int(match["offset"], 16)
            labels |= dict.fromkeys(waiting, offset)
            waiting = []
            target = _TARGET.search(match["rest"]) if match["opcode"].startswith("BRA") else None
            lines.append((Instruction(offset, match["opcode"]), target[1] if target else None))
    finish()
    return kernels


def disassemble(binary: bytes) -> dict[str, Kernel]:
    """Name → kernel, for the kernels of a compiled binary. Raises EngineError without nvdisasm."""
    program = disassembler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        done = subprocess.run([str(program), "-c", str(path)], capture_output=True, text=True, timeout=60, check=True)
    return parse(done.stdout)


@cache
def disassembler() -> Path:
    """The path of nvdisasm, from its wheel, PATH or CUDA_HOME. Raises EngineError if it is not found."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*/bin/nvdisasm*")):
            return path
    places = [os.environ.get("PATH", ""), str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")]
    if program := shutil.which("nvdisasm", path=os.pathsep.join(places)):
        return Path(program)
    raise EngineError(
        "Instructions are counted with nvdisasm, which is not installed: pip install nvidia-cuda-nvdisasm"
    )
