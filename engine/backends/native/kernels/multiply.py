"""Products of float32 matrices, a few rows at a time, emitted inside other kernels."""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector


def multiply(
    e: Emitter,
    left: Value,
    left_stride: int,
    right: Value,
    right_stride: int,
    size: Value,
    start: Sequence[Sequence[Value]],
) -> list[list[Value]]:
    """start + left (rows, size) @ right (size, columns); strides: bytes from row to row.

    start and the result are vectors of consecutive columns, for each row; they stay in registers.
    """
    sums = [[e.variable(value) for value in row] for row in start]
    lanes = [value.lanes for value in start[0]]
    with e.loop(0, size) as i:
        at = right + i * right_stride
        parts = [e.load(at, vector(F32, own), 4 * sum(lanes[:number])) for number, own in enumerate(lanes)]
        for row, totals in enumerate(sums):
            factor = e.load(left + i * 4, F32, left_stride * row)
            for part, total in zip(parts, totals, strict=True):
                total.set(e.fma(part, factor, total.get()))
    return [[total.get() for total in totals] for totals in sums]
