"""The table of `kernels/linear/README.md`: which way of multiplying products take."""

import re
from itertools import groupby
from pathlib import Path

from polarlm.engine import weight_formats
from polarlm.engine.backends.native.kernels import linear
from polarlm.engine.backends.native.kernels.linear.activations import inputs_for
from polarlm.engine.backends.native.kernels.linear.product import ProductSpec, way
from polarlm.engine.backends.native.kernels.linear.tiling import tiling
from polarlm.engine.jit.isa.levels import LEVELS

README = Path(linear.__path__[0]) / "README.md"
ROWS = 600


def ways(level: str, name: str, bits: str) -> str:
    """As in the table: each way, and the most rows that take it."""
    (own,), format = [one for one in LEVELS if one.name == level], weight_formats.get(name)
    taken = []
    for rows in range(1, ROWS + 1):
        inputs = inputs_for(format, 256, own, waits=rows == 1, bits=bits)
        taken.append((way(ProductSpec(format, tiling(rows, own, inputs), inputs=inputs), own).value, rows))
    runs = [(name, max(rows for _, rows in group)) for name, group in groupby(taken, key=lambda one: one[0])]
    return ", ".join(name if last == ROWS else f"{name} to {last}" for name, last in runs)


def test_the_table_of_ways_is_the_codes() -> None:
    head, *lines = [
        line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith(("| Level", "| `"))
    ]
    columns = [re.findall(r"`([\w-]+)`", cell) for cell in head.strip("| ").split(" | ")[1:]]
    bits = ["8" if "8 bits" in cell else "16" for cell in head.strip("| ").split(" | ")[1:]]
    found = set()
    for line in lines:
        levels, *cells = line.strip("| ").split(" | ")
        for level in re.findall(r"`([\w-]+)`", levels):
            found.add(level)
            for names, size, cell in zip(columns, bits, cells, strict=True):
                for name in names:
                    assert ways(level, name, size) == cell, (level, name, size)
    assert found == {level.name for level in LEVELS}
