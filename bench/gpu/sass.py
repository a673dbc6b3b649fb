"""Counts of the instructions of compiled kernels, from nvdisasm's text. No GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from polarlm.engine.errors import EngineError

_WARP_BYTES = 128  # bytes that one access of shared memory or of the L1 cache moves
_FUNCTION = re.compile(r"^\.text\.(?P<kernel>\w+):$")
_LABEL = re.compile(r"^(?P<label>\.L_\w+):$")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>[^;]*);"
)
_CONTROL = re.compile(r"^\s*/\* 0x(?P<word>[0-9a-f]{16}) \*/$")  # the upper half of an instruction, on its own line
_TARGET = re.compile(r"`\((\.L_\w+)\)")

# Instructions of the pipe for integers, logic, comparisons and permutes, which takes two clocks per warp.
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

# Estimated latency in clocks of instructions whose results others wait for by a scoreboard. Global memory is left out,
# since loops load the next iteration's data.
_DELAYS = {"LDS": 29, "SHFL": 24, "MUFU": 20, "MOVM": 33, "LDG": 0, "LDGSTS": 0}
_DELAY = 24  # latency of all others
_SCOREBOARDS = 6

_OF_WARPGROUP = re.compile(r"HGMMA\.64x(\d+)x16\.F32")


@dataclass(frozen=True)
class Instruction:
    """An instruction. target: the offset that a branch jumps to. stall: clocks until the warp issues its next
    instruction. sets: the scoreboard that its result clears, if any. waits: a bit for each scoreboard that must be
    clear."""

    offset: int
    opcode: str
    target: int | None = None
    stall: int = 1
    sets: int | None = None
    waits: int = 0

    def with_control(self, word: int) -> Instruction:
        """The instruction with the control fields in its upper 64 bits."""
        sets = word >> 46 & 7
        return replace(
            self, stall=max(1, word >> 41 & 15), sets=sets if sets < _SCOREBOARDS else None, waits=word >> 52 & 63
        )

    @property
    def name(self) -> str:
        """The opcode without modifiers: "LDG" of "LDG.E.128"."""
        return self.opcode.split(".")[0]

    @property
    def lane_bytes(self) -> int:
        """Bytes that a memory instruction moves per lane."""
        if self.name in ("LDSM", "STSM"):  # 8 x 8 matrices of half precision: 4 bytes of a lane each
            return 4 * next((n for n in (4, 2) if f".{n}" in self.opcode), 1)
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        return next((widths[part] for part in self.opcode.split(".") if part in widths), 4)


@dataclass(frozen=True)
class Counts:
    """Counts of the instructions of one warp. seldom: how many of `total` are in branches that hardly ever run.

    alu: instructions of the integer pipe. port: clocks of the port that shared memory and the L1 cache share. hmma:
    products of 16 × 8 × 16 numbers on tensor cores, several of which are one of a warpgroup. ffma: those of float32.
    wide_loads: loads from global memory of 16 bytes per lane.
    latency: clocks of a warp that runs alone, outside of seldom branches.
    """

    total: int
    seldom: int
    alu: int
    port: int
    hmma: int
    ffma: int
    lds: int
    shuffles: int
    special: int
    moves: int
    wide_loads: int
    latency: int

    @property
    def common(self) -> int:
        """Instructions outside of seldom branches."""
        return self.total - self.seldom


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. instructions: in order of their offsets."""

    name: str
    instructions: Sequence[Instruction]

    def loops(self) -> Iterator[Sequence[Instruction]]:
        """Yields all loops: instructions from the target of a backward branch to that branch. Loops may be nested."""
        for first, last in sorted({(i.target, i.offset) for i in self.instructions if i.target is not None}):
            if first < last:
                yield [i for i in self.instructions if first <= i.offset <= last]

    def multiplying_loop(self) -> Counts:
        """The counts of the innermost loop with the most float32 products. Raises EngineError if there is none."""
        inner = [loop for loop in self.loops() if any(map(_is_multiplication, loop))]
        inner = [a for a in inner if not any(_within(b, a) for b in inner)]
        if not inner:
            raise EngineError(f"{self.name} has no loop over products of float32: its instructions cannot be counted")
        return counts(max(inner, key=lambda loop: sum(map(_is_multiplication, loop))))

    def nested_loops(self) -> tuple[Counts, list[Counts]]:
        """The counts of the loop with the most products on tensor cores, without loops within it, and those of its
        innermost loops with such products, in their order. Raises EngineError if there are none."""
        working = [loop for loop in self.loops() if any(map(_is_product, loop))]
        inner = [a for a in working if not any(_within(b, a) for b in working)]
        outer = [loop for loop in working if any(_within(one, loop) for one in inner)]
        if not outer:
            raise EngineError(f"{self.name} has no loop around loops of products: its instructions cannot be counted")
        largest = max(outer, key=lambda loop: sum(map(_is_product, loop)))
        inside = {i.offset for loop in self.loops() if _within(loop, largest) for i in loop}
        rest = [i for i in largest if i.offset not in inside]
        return counts(rest), [counts(loop) for loop in inner if _within(loop, largest)]

    def hot_loop(self) -> Counts:
        """The counts of the loop that does the kernel's work: the innermost loop with the most products on tensor
        cores, or, in a kernel without such loops, with the most loads of 16 bytes.

        Raises EngineError if there is no such loop.
        """
        for is_work in (_is_product, _is_wide_load):
            working = [loop for loop in self.loops() if any(map(is_work, loop))]
            inner = [a for a in working if not any(_within(b, a) for b in working)]
            if inner:
                return counts(max(inner, key=lambda loop: (sum(map(is_work, loop)), len(loop))))
        raise EngineError(f"{self.name} has no loop over loads or products: its instructions cannot be counted")


def _is_product(instruction: Instruction) -> bool:
    return instruction.name in ("HMMA", "HGMMA")


def _products(instruction: Instruction) -> int:
    """Products of 16 × 8 × 16 numbers of a warp."""
    of_warpgroup = _OF_WARPGROUP.match(instruction.opcode)
    return int(of_warpgroup[1]) // 8 if of_warpgroup else int(instruction.name == "HMMA")


def _is_multiplication(instruction: Instruction) -> bool:
    return instruction.name in ("FFMA", "FFMA2")


def _is_wide_load(instruction: Instruction) -> bool:
    return instruction.name == "LDG" and instruction.lane_bytes == 16


def _within(inner: Sequence[Instruction], outer: Sequence[Instruction]) -> bool:
    """Whether `outer` contains `inner` and is longer."""
    return len(inner) < len(outer) and outer[0].offset <= inner[0].offset and inner[-1].offset <= outer[-1].offset


def counts(instructions: Sequence[Instruction]) -> Counts:
    """The counts of consecutive instructions.

    A part that a forward branch skips counts as seldom unless it reads global memory or has products on tensor cores:
    loads are skipped only at the end of a sequence, so the rest is masks and new maxima.
    """

    def number(*names: str) -> int:
        return sum(i.name in names for i in instructions)

    seldom = _seldom(instructions)
    return Counts(
        total=len(instructions),
        seldom=len(seldom),
        alu=sum(i.name in _ALU for i in instructions),
        port=sum(_port(i) for i in instructions),
        hmma=sum(map(_products, instructions)),
        ffma=sum(map(_is_multiplication, instructions)),
        lds=number("LDS"),
        shuffles=number("SHFL"),
        special=number("MUFU"),
        moves=number("MOV") + sum(i.opcode.startswith("IMAD.MOV") for i in instructions),
        wide_loads=sum(map(_is_wide_load, instructions)),
        latency=_latency([i for i in instructions if i.offset not in seldom]),
    )


def _latency(instructions: Sequence[Instruction]) -> int:
    """Clocks of the second iteration of a loop, for a warp that waits only for its own results."""
    now, begun, clear = 0, 0, [0] * _SCOREBOARDS
    for _ in range(2):
        begun = now
        for i in instructions:
            now = max([now, *(at for number, at in enumerate(clear) if i.waits >> number & 1)])
            if i.sets is not None:
                clear[i.sets] = max(clear[i.sets], now + _DELAYS.get(i.name, _DELAY))
            now += i.stall
    return now - begun


def _seldom(instructions: Sequence[Instruction]) -> set[int]:
    """Offsets of instructions in seldom branches."""
    found, last = set[int](), instructions[-1].offset
    for branch in instructions:
        if branch.target is None or not branch.offset < branch.target <= last:
            continue
        skipped = [i for i in instructions if branch.offset < i.offset < branch.target]
        if not any(i.name in ("LDG", "LDGSTS", "HMMA", "HGMMA") for i in skipped):
            found |= {i.offset for i in skipped}
    return found


def _port(instruction: Instruction) -> int:
    """Clocks of the port of shared memory and L1 that an instruction of a warp takes without bank conflicts."""
    if instruction.name == "SHFL":
        return 1
    if instruction.name in _SHARED or instruction.name in ("LDG", "STG", "LDGSTS"):
        return max(1, 32 * instruction.lane_bytes // _WARP_BYTES)
    return 0


def parse(text: str) -> dict[str, Kernel]:
    """Name → kernel, for the kernels in nvdisasm's output. Instructions have stalls only with its option -hex."""
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
        elif found := _INSTRUCTION.match(line):
            offset = int(found["offset"], 16)
            labels |= dict.fromkeys(waiting, offset)
            waiting = []
            target = _TARGET.search(found["rest"]) if found["opcode"].startswith("BRA") else None
            lines.append((Instruction(offset, found["opcode"]), target[1] if target else None))
        elif (control := _CONTROL.match(line)) and lines:
            instruction, label_of_target = lines[-1]
            lines[-1] = instruction.with_control(int(control["word"], 16)), label_of_target
    finish()
    return kernels


def disassemble(binary: bytes) -> dict[str, Kernel]:
    """Name → kernel, for the kernels of a compiled binary. Raises EngineError without nvdisasm."""
    program = disassembler()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        done = subprocess.run([str(program), "-c", "-hex", str(path)], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise EngineError(f"{program} cannot read what NVRTC compiled: {done.stderr.strip() or 'it gave no reason'}")
    return parse(done.stdout)


@cache
def disassembler() -> Path:
    """The path of nvdisasm, from its wheel, PATH or CUDA_HOME. Raises EngineError if it is not found."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*/bin/nvdisasm*")):
            return path
    places = [os.environ.get("PATH", ""), str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin")]
    if found := shutil.which("nvdisasm", path=os.pathsep.join(places)):
        return Path(found)
    raise EngineError(
        "Instructions are counted with nvdisasm, which is not installed: pip install nvidia-cuda-nvdisasm"
    )
