"""Products of float32 matrices, a few rows at a time, emitted inside other kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector


def multiply(
    e: Emitter,
    left: Value,
    left_stride: int,
    right: Value,
    right_stride: int | Value,
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


def pieces(channels: int) -> Iterator[tuple[int, int]]:
    """Yields (first channel, lanes) of vectors of 16, 8, 4, 2 or 1 lanes that together cover the channels."""
    first = 0
    for lanes in (16, 8, 4, 2, 1):
        while channels - first >= lanes:
            yield first, lanes
            first += lanes


class Left(NamedTuple):
    """The left matrix of a product, float32 (rows, size). stride: bytes from row to row."""

    address: Value
    stride: int
    rows: Value
    size: Value


def product(
    e: Emitter,
    left: Left,
    right: tuple[Value, int],
    start: Callable[[Value, int, int], Value],
    finish: Callable[[Value, int, Value], None],
    tile: tuple[int, int],
    seen: Value | None = None,
) -> None:
    """left @ right (size, columns) + start, by tiles of rows and of vectors of 16 columns.

    right: the address and the columns of a matrix without padding. start(row, column, lanes) returns what the sums of a
    row begin with; finish(row, column, value) takes them. tile: its rows and vectors. seen: columns from here on are
    not needed. The sums of a row have the same terms in the same order whichever tile they are in.
    """
    (height, vectors), (matrix, columns) = tile, right
    parts = list(pieces(columns))
    whole = left.rows // height * height

    def compute(row: Value, height: int, group: Sequence[tuple[int, int]]) -> None:
        own, column = [row + i for i in range(height)], group[0][0]
        begin = [[start(i, first, lanes) for first, lanes in group] for i in own]
        at = left.address + row * left.stride
        sums = multiply(e, at, left.stride, matrix + 4 * column, 4 * columns, left.size, begin)
        for i, totals in zip(own, sums, strict=True):
            for (first, _), total in zip(group, totals, strict=True):
                finish(i, first, total)

    for number in range(0, len(parts), vectors):
        group = parts[number : number + vectors]
        with e.when(seen > group[0][0]) if seen is not None else nullcontext():
            with e.loop(0, whole, height) as row:
                compute(row, height, group)
            if height > 1:
                with e.loop(whole, left.rows) as row:
                    compute(row, 1, group)
