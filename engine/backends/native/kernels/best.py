"""The argmax of each row of logits."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Int64, Pointer
from polarlm.engine.jit.lang.values import F32, I32, Value, vector

NONE = -1

_TOGETHER = 2  # independent vectors of maxima: with one, each comparison would wait for the previous one
_LANES = 16
LOWEST = -3.4028234663852886e38  # the least float32


class BestArguments(NamedTuple):
    """Arguments of `best_of_rows`."""

    x: Pointer
    best: Pointer
    columns: Int64
    stride: Int64


@cache
def best_of_rows() -> Kernel[BestArguments]:
    """The column of the maximum of each row, the first of equal ones; one unit per row.

    x (rows, columns) float32; stride: bytes from row to row. best (rows,) int32: the columns, or NONE where a number of
    the row is not finite. At most 2²⁴ columns: column numbers are compared as float32.
    """

    def emit(e: Emitter, args: BestArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row:
            e.store(best(e, args.x + row * args.stride, args.columns), args.best + row * 4)

    return Kernel("best_of_rows", emit, BestArguments)


def best(e: Emitter, x: Value, columns: Value) -> Value:
    """The column of the maximum of float32 (columns,) at x, int32; see `best_of_rows`."""
    step = _TOGETHER * _LANES
    whole = columns // step * step
    widths = [*([_LANES] * _TOGETHER), 0]  # lanes: of the vectors for whole steps, then 0 for the scalar remainder
    floats, integers = zip(*((vector(F32, n), vector(I32, n)) if n else (F32, I32) for n in widths), strict=True)
    tops = [e.variable(e.constant(kind, LOWEST)) for kind in floats]
    columns_of = [e.variable(e.constant(kind, 0)) for kind in integers]
    infinite = [e.variable(e.constant(kind, 0.0)) for kind in floats]  # becomes NaN if a number is not finite

    def see(number: int, column: Value) -> None:
        value = e.load(x + column * 4, floats[number], 4 * _LANES * number if widths[number] else 0)
        own = e.like(column.trunc(I32), columns_of[number].get())
        better = value > tops[number].get()
        tops[number].set(e.select(better, value, tops[number].get()))
        columns_of[number].set(e.select(better, own, columns_of[number].get()))
        infinite[number].set(e.fma(value, e.like(0.0, value), infinite[number].get()))

    with e.loop(0, whole, step) as column:
        for number in range(_TOGETHER):
            see(number, column)
    with e.loop(whole, columns) as column:
        see(_TOGETHER, column)

    def over_lanes(values: list[Value]) -> Value:
        highest = values[-1]
        for value in values[:-1]:
            highest = e.fmax(highest, e.fmax_lanes(value))
        return highest

    top = over_lanes([own.get() for own in tops])
    places = []
    for number, (own, column_of, lanes) in enumerate(zip(tops, columns_of, widths, strict=True)):
        first = tuple(range(_LANES * number, _LANES * (number + 1))) if lanes else 0
        place = (column_of.get() + e.constant(integers[number], first)).to_float()
        places.append(e.select(own.get().equals(top), -place, e.like(LOWEST, place)))
    total = infinite[-1].get()
    for own in infinite[:-1]:
        total = total + e.sum_lanes(own.get())
    return e.select(total.equals(0.0), (-over_lanes(places)).to_int(), e.constant(I32, NONE))
