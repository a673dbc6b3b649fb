"""Writes the tables of docs/cpu-levels.md, between their marks: vector instructions per value in the hot loops of
kernels, as this machine's LLVM compiles them for each level, and speeds that CPUs of AArch64 should reach with them.

Speeds are predictions: a core's vector pipes and clock, as published, over instructions per value, as if every pipe
were busy in every cycle and memory kept up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from polarlm.engine import codecs
from polarlm.engine.backends.native import codecs as tiles
from polarlm.engine.backends.native.kernels.linear.block_sums import passes
from polarlm.engine.backends.native.kernels.linear.product import Product, product
from polarlm.engine.backends.native.kernels.linear.tiling import SINGLE, become_words, largest_tiling
from polarlm.engine.jit.isa.levels import LEVELS, Level
from polarlm.engine.weight_formats import get
from scripts.make_quality_table import with_tables
from tests.backends.native.codecs import attend
from tests.backends.native.hot_loops import OF_WORDS, Loop

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "cpu-levels.md"
SHOWN = sorted(
    (level for level in LEVELS if level.name == "avx2" or level.machine == "aarch64"), key=lambda level: level.name
)
FORMATS = "q4_1", "q8_0", "q6_k", "iq4_xs"
QUERIES = 3  # that read a block together


class Cpu(NamedTuple):
    """pipes: vector instructions per cycle of a core. ghz: its clock. bandwidth: of the memory, GB/s."""

    level: str
    pipes: int
    ghz: float
    bandwidth: float


CPUS = {
    "Apple M2, a performance core": Cpu("neon-i8mm", 4, 3.49, 100),
    "Graviton 3 (Neoverse V1)": Cpu("neon-i8mm", 4, 2.6, 307),
    "Raspberry Pi 5 (Cortex-A76)": Cpu("neon-dot", 2, 2.4, 17),
}


@cache
def of_weights(name: str, level: Level, *, many: bool) -> float:
    """Instructions for each weight and row; many: with the tiling for many rows."""
    sizes = largest_tiling(level) if many else SINGLE
    if become_words(sizes, level):
        loop = Loop(product(Product(get(name), sizes)), level, share_of=OF_WORDS[level.name])
        return len(loop) / (2 * level.lanes * loop.count(OF_WORDS[level.name]))
    outputs = passes(level, sizes.rows)[0].size
    return len(Loop(product(Product(get(name), sizes)), level)) / (32 * outputs * sizes.rows * sizes.tiles)


@cache
def of_keys(name: str, level: Level, values: int) -> float:
    """Instructions for each value of K and query. values: of K in an iteration of the loop."""
    own = tiles.keys(codecs.get(name), 64, 64)
    assert own is not None
    return len(Loop(attend.scores_kernel(own, 64, QUERIES), level)) / (values * QUERIES)


@cache
def of_values(name: str, level: Level, values: int) -> float:
    """The same for V."""
    own = tiles.values(codecs.get(name), 64, 64)
    assert own is not None
    return len(Loop(attend.mix_kernel(own, 64, 64, QUERIES), level)) / (values * QUERIES)


def instructions_table() -> str:
    """A table of kernels and levels."""
    rows: list[tuple[str, Callable[[Level], float]]] = []
    for name in FORMATS:
        rows.append((f"`{name}`, one row", lambda level, name=name: of_weights(name, level, many=False)))  # type: ignore[misc]
        rows.append((f"`{name}`, many rows", lambda level, name=name: of_weights(name, level, many=True)))  # type: ignore[misc]
    rows.append(("keys as `ring4`", lambda level: of_keys("ring4", level, 128 if level.keeps_order else 512)))
    rows.append(("keys as `f16`", lambda level: of_keys("f16", level, 64)))
    rows.append(("values as `polarquant`", lambda level: of_values("polarquant", level, 128)))
    lines = [f"| Kernel | {' | '.join(f'`{level.name}`' for level in SHOWN)} |", "|---" * (1 + len(SHOWN)) + "|"]
    lines += [f"| {title} | {' | '.join(f'{count(level):.2f}' for level in SHOWN)} |" for title, count in rows]
    return "\n".join(lines)


def predictions_table() -> str:
    """A table of CPUs: 10⁹ weights of Q4_1 per second of a core, and cores that read as fast as the memory gives."""
    lines = [
        "| CPU | Level | Pipes · GHz | Step, 10⁹ weights/s | as GB/s | Memory, GB/s | Prompt, 10⁹ weights · rows/s |",
        "|---" * 7 + "|",
    ]
    for title, cpu in CPUS.items():
        (level,) = (level for level in LEVELS if level.name == cpu.level)
        rate = cpu.pipes * cpu.ghz
        step, prompt = (rate / of_weights("q4_1", level, many=many) for many in (False, True))
        read = step * get("q4_1").nbytes / get("q4_1").values
        cells = [
            title,
            f"`{cpu.level}`",
            f"{cpu.pipes} · {cpu.ghz}",
            f"{step:.0f}",
            f"{read:.0f}",
            f"{cpu.bandwidth:.0f}",
        ]
        lines.append(f"| {' | '.join([*cells, f'{prompt:.0f}'])} |")
    return "\n".join(lines)


TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    DOCUMENT: {"instructions": instructions_table, "predictions": predictions_table}
}


if __name__ == "__main__":
    for document, tables in TABLES.items():
        document.write_text(with_tables(document.read_text(encoding="utf-8"), tables), encoding="utf-8")
