"""Products of float32 matrices, a few rows at a time, emitted inside other kernels; rotations of
vectors of D channels; and arrays in scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import NamedTuple

from polarlm.engine.jit.lang import F32, Emitter, Value, Values, vector


def offsets(*sizes: int) -> list[int]:
    """Offsets in bytes of float32 arrays of these sizes in scratch memory, each at the start of a cache line; and the
    end of the last one."""
    return list(accumulate((-(-numbers // 16) * 64 for numbers in sizes), initial=0))


def multiply(
    e: Emitter,
    left: Value,
    left_stride: int,
    right: Value,
    right_stride: int | Value,
    size: Value,
    start: Sequence[Values],
) -> list[list[Value]]:
    """start + left (rows, size) @ right (size, columns); strides: bytes from row to row.

    start and the result are vectors of consecutive columns, for each row; they stay in registers.
    """
    sums = [[e.variable(value) for value in row] for row in start]
    lanes = [value.lanes for value in start[0]]
    with e.loop(0, size) as i:
        row_address = right + i * right_stride
        parts = [e.load(row_address, vector(F32, count), 4 * sum(lanes[:number])) for number, count in enumerate(lanes)]
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


class LeftMatrix(NamedTuple):
    """The left matrix of a product, float32 (rows, size). stride: bytes from row to row."""

    address: Value
    stride: int
    rows: Value
    size: Value


def product(
    e: Emitter,
    left: LeftMatrix,
    right: tuple[Value, int],
    start: Callable[[Value, int, int], Value],
    finish: Callable[[Value, int, Value], None],
    tile: tuple[int, int],
    visible_columns: Value | None = None,
) -> None:
    """left @ right (size, columns) + start, by tiles of rows and of vectors of 16 columns.

    right: the address and the columns of a matrix without padding. start(row, column, lanes) returns what the sums of a
    row begin with; finish(row, column, value) takes them. tile: its rows and vectors. visible_columns: columns from
    here on are not needed. The sums of a row have the same terms in the same order whichever tile they are in.
    """
    (height, vectors), (matrix, columns) = tile, right
    parts = list(pieces(columns))
    whole = left.rows // height * height

    def compute(row: Value, height: int, group: Sequence[tuple[int, int]]) -> None:
        rows, column = [row + i for i in range(height)], group[0][0]
        begin = [[start(i, first, lanes) for first, lanes in group] for i in rows]
        row_address = left.address + row * left.stride
        sums = multiply(e, row_address, left.stride, matrix + 4 * column, 4 * columns, left.size, begin)
        for i, totals in zip(rows, sums, strict=True):
            for (first, _), total in zip(group, totals, strict=True):
                finish(i, first, total)

    for number in range(0, len(parts), vectors):
        group = parts[number : number + vectors]
        with e.when(visible_columns > group[0][0]) if visible_columns is not None else nullcontext():
            with e.loop(0, whole, height) as row:
                compute(row, height, group)
            if height > 1:
                with e.loop(whole, left.rows) as row:
                    compute(row, 1, group)


def rotate(e: Emitter, x: Value, target: Value, memory: Value, dim: int, order: int) -> None:
    """x (D,) @ rotation → target (D,), float32; order and memory: see `Rotation`. target may be x unless order is 0.

    For a Hadamard matrix the caller has already multiplied x by the signs before it.
    """
    if order == 1:
        for first, lanes in pieces(dim):
            e.store(e.load(x, vector(F32, lanes), 4 * first), target, 4 * first)
    elif order == 0:
        for place, (value,) in rotate_dense(e, x, memory, dim, 1):
            e.store(value, target, place)
    else:
        for first in range(0, dim, order):
            _hadamard(e, x, target, memory, first, order)


def rotate_dense(e: Emitter, x: Value, matrix: Value, dim: int, rows: int) -> Iterator[tuple[int, list[Value]]]:
    """x (rows, D) @ matrix (D, D). Yields offset in bytes and, for each row, the vector of result channels there."""
    part_tile = max(4, e.level.lanes // 4) if rows == 1 else max(1, e.level.lanes // 4)
    parts = list(pieces(dim))
    for number in range(0, len(parts), part_tile):
        group = parts[number : number + part_tile]
        start = [[e.zero(vector(F32, lanes)) for _, lanes in group] for _ in range(rows)]
        sums = multiply(e, x, 4 * dim, matrix + 4 * group[0][0], 4 * dim, e.i64(dim), start)
        for (first, _), values in zip(group, zip(*sums, strict=True), strict=True):
            yield 4 * first, list(values)


def _hadamard(e: Emitter, x: Value, target: Value, output_signs: Value, first: int, order: int) -> None:
    """The fast Walsh-Hadamard transform of `order` (a power of two) channels from `first` on, times `output_signs`."""
    lanes = min(order, 16)
    places = range(4 * first, 4 * (first + order), 4 * lanes)
    whole = [e.load(x, vector(F32, lanes), place) for place in places]
    step = 1
    while step < len(whole):
        for i in range(len(whole)):
            if not i & step:
                whole[i], whole[i + step] = whole[i] + whole[i + step], whole[i] - whole[i + step]
        step *= 2
    step = 1
    while step < lanes:
        signs = e.constant(vector(F32, lanes), [-1.0 if lane & step else 1.0 for lane in range(lanes)])
        whole = [e.fma(part, signs, e.shuffle(part, part, [lane ^ step for lane in range(lanes)])) for part in whole]
        step *= 2
    for part, place in zip(whole, places, strict=True):
        e.store(part * e.load(output_signs, part.type, place), target, place)
