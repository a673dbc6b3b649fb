"""Instructions of compiled kernels, counted in the text that nvdisasm writes. No GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.errors import EngineError

_WARP_BYTES = 128  # that one access of shared memory or of the L1 cache moves
_FUNCTION = re.compile(r"^\.text\.(?P<kernel>\w+):$")
_LABEL = re.compile(r"^(?P<label>\.L_\w+):$")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
_TARGET = re.compile(r"`\((\.L_\w+)\)")

# Instructions of the pipe for integers, logic, comparisons and permutes, which takes two clocks for a warp.
_ALU = frozenset(
    (
        "LOP3",
        "SHF",
        "PRMT",
        "IADD3",
        "LEA",
        "ISETP",
        "FSETP",
        "HSETP2",
        "FMNMX",
        "IMNMX",
        "VIMNMX",
        "SEL",
        "FSEL",
        "MOV",
        "PLOP3",
        "SGXT",
        "BMSK",
    )
)
_SHARED = frozenset({"LDS", "STS", "LDSM", "STSM", "ATOMS"})


@dataclass(frozen=True)
class Instruction:
    """target: the offset that a branch goes to."""

    offset: int
    opcode: str
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without modifiers: "LDG" of "LDG.E.128"."""
        return self.opcode.split(".")[0]

    @property
    def lane_bytes(self) -> int:
        """Bytes that each lane of a memory instruction moves."""
        if self.name in ("LDSM", "STSM"):  # 8 x 8 matrices of half precision: 4 bytes of a lane each
            return 4 * next((n for n in (4, 2) if f".{n}" in self.opcode), 1)
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((widths[part] for part in self.opcode.split(".") if part in widths), 4)


@dataclass(frozen=True)
class Counts:
    """Instructions of one warp. seldom: how many of `total` lie in branches that hardly ever run.

    alu: of the integer pipe. port: clocks of the port that shared memory and the L1 cache share. hmma: products on
    tensor cores. wide_loads: loads from global memory of 16 bytes a lane.
    """

    total: int
    seldom: int
    alu: int
    port: int
    hmma: int
    lds: int
    shuffles: int
    permutes: int
    special: int
    moves: int
    wide_loads: int

    @property
    def common(self) -> int:
        """Instructions outside of seldom branches."""
        return self.total - self.seldom


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, its instructions in order of their offsets."""

    name: str
    instructions: Sequence[Instruction]

    def loops(self) -> Iterator[Sequence[Instruction]]:
        """All loops: from the target of a backward branch to that branch. One may contain others."""
        for first, last in sorted({(i.target, i.offset) for i in self.instructions if i.target is not None}):
            if first < last:
                yield [i for i in self.instructions if first <= i.offset <= last]

    def hot_loop(self) -> Counts:
        """The loop that does the kernel's work: of the loops with products on tensor cores, if there are any, and
        otherwise of those with loads of 16 bytes, the one with most of them that contains no other such loop.

        Raises EngineError if there is no such loop.
        """
        for is_work in (_is_product, _is_wide_load):
            working = [loop for loop in self.loops() if any(map(is_work, loop))]
            inner = [a for a in working if not any(_within(b, a) for b in working)]
            if inner:
                return counts(max(inner, key=lambda loop: (sum(map(is_work, loop)), len(loop))))
        raise EngineError(f"{self.name} has no loop over loads or products: its instructions cannot be counted")


def _is_product(instruction: Instruction) -> bool:
    return instruction.name == "HMMA"


def _is_wide_load(instruction: Instruction) -> bool:
    return instruction.name == "LDG" and instruction.lane_bytes == 16


def _within(inner: Sequence[Instruction], outer: Sequence[Instruction]) -> bool:
    """Whether `outer` contains `inner` and is longer."""
    return len(inner) < len(outer) and outer[0].offset <= inner[0].offset and inner[-1].offset <= outer[-1].offset


def counts(instructions: Sequence[Instruction]) -> Counts:
    """The counts of a stretch of instructions.

    A part that a forward branch skips is seldom unless it reads global memory or has products on tensor cores: loads
    are skipped only at the end of a sequence, masks and new maxima are what is left.
    """

    def number(*names: str) -> int:
        return sum(i.name in names for i in instructions)

    return Counts(
        total=len(instructions),
        seldom=len(_seldom(instructions)),
        alu=sum(i.name in _ALU for i in instructions),
        port=sum(_port(i) for i in instructions),
        hmma=sum(map(_is_product, instructions)),
        lds=number("LDS"),
        shuffles=number("SHFL"),
        permutes=number("PRMT"),
        special=number("MUFU"),
        moves=number("MOV") + sum(i.opcode.startswith("IMAD.MOV") for i in instructions),
        wide_loads=sum(map(_is_wide_load, instructions)),
    )


def _seldom(instructions: Sequence[Instruction]) -> set[int]:
    """Offsets of instructions in seldom branches."""
    found, last = set[int](), instructions[-1].offset
    for branch in instructions:
        if branch.target is None or not branch.offset < branch.target <= last:
            continue
        skipped = [i for i in instructions if branch.offset < i.offset < branch.target]
        if not any(i.name in ("LDG", "LDGSTS", "HMMA") for i in skipped):
            found |= {i.offset for i in skipped}
    return found


def _port(instruction: Instruction) -> int:
    """Clocks of the port of shared memory and L1 for one warp, without bank conflicts."""
    if instruction.name == "SHFL":
        return 1
    if instruction.name in _SHARED or instruction.name in ("LDG", "STG", "LDGSTS"):
        return max(1, 32 * instruction.lane_bytes // _WARP_BYTES)
    return 0


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of nvdisasm's output, by name."""
    kernels: dict[str, Kernel] = {}
    lines: list[tuple[int, str, str | None]] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    name = ""

    def finish() -> None:
        if lines:
            found = [Instruction(at, opcode, labels.get(label) if label else None) for at, opcode, label in lines]
            kernels[name] = Kernel(name, found)

    for line in text.splitlines():
        if function := _FUNCTION.match(line):
            finish()
            name, lines, labels, waiting = function["kernel"], [], {}, []
        elif label := _LABEL.match(line):
            waiting.append(label["label"])
        elif found := _INSTRUCTION.match(line):
            offset = int(found["offset"], 16)
            labels |= dict.fromkeys(waiting, offset)
            waiting = []
            target = _TARGET.search(found["rest"]) if found["opcode"].startswith("BRA") else None
            lines.append((offset, found["opcode"], target[1] if target else None))
    finish()
    return kernels


def disassemble(binary: bytes) -> dict[str, Kernel]:
    """The kernels of a compiled binary, by name. Raises EngineError without nvdisasm."""
    program = disassembler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        done = subprocess.run([str(program), "-c", str(path)], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise EngineError(f"{program} cannot read what NVRTC compiled: {done.stderr.strip() or 'it gave no reason'}")
    return parse(done.stdout)


@cache
def disassembler() -> Path:
    """nvdisasm of its wheel, of PATH, or of CUDA_HOME. Raises EngineError if there is none."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*/bin/nvdisasm*")):
            return path
    places = [os.environ.get("PATH", ""), str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")]
    if found := shutil.which("nvdisasm", path=os.pathsep.join(places)):
        return Path(found)
    raise EngineError("Counting instructions needs nvdisasm: install the package nvidia-cuda-nvdisasm with pip")
