"""Records in memory: arguments of kernels, and rows of tables, by the names of their fields."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang import Emitter, Float32, Int64, Level, Pointer, Value, read
from polarlm.engine.jit.lang.records import pack, words
from tests.jit.levels import declared, every_level, run


class Step(NamedTuple):
    factor: Float32
    table: Pointer
    count: Int64
    out: Pointer


class TableRow(NamedTuple):
    number: Int64
    weight: Float32


@every_level
def test_a_kernel_reads_its_arguments_and_rows_of_a_table_by_name(level: Level) -> None:
    def emit(e: Emitter, args: Step, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(0, args.count) as number:
            row = read(e, TableRow, args.table, number)
            e.store(row.weight * args.factor, args.out + row.number * 4)

    rows = [TableRow(number=number, weight=number + 0.5) for number in (2, 0, 1)]
    table, out = np.array([words(row) for row in rows]), np.zeros(3, np.float32)
    run(Kernel("test_step", emit, Step), level, 1, Step(out=out, table=table, count=3, factor=2))
    assert out.tolist() == [1, 3, 5]


def test_none_is_the_address_zero() -> None:
    out = np.zeros(1)
    packed = pack(Step(factor=1.5, table=None, count=-1, out=out))
    assert struct.unpack("=f4xqqq", packed) == (1.5, 0, -1, out.ctypes.data)


@pytest.mark.parametrize(
    "mistake", [{"count": np.zeros(3)}, {"count": 1.5}, {"count": None}, {"table": 0.5}, {"factor": "1"}]
)
def test_a_field_of_another_kind_is_an_error(mistake: dict[str, Any]) -> None:
    with pytest.raises((struct.error, TypeError)):
        pack(Step(**{"factor": 1.0, "table": 0, "count": 1, "out": 0, **mistake}))


def test_arguments_of_another_kernel_are_an_error() -> None:
    kernel = Kernel("test_mixed_up", lambda e, args, begin, end, scratch: None, declared("x", "n"))
    with pytest.raises(AssertionError, match="test_mixed_up"):
        kernel.pack(TableRow(number=1, weight=1.0))
