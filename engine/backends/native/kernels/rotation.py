"""Rotations of vectors of D channels, emitted inside other kernels."""

from __future__ import annotations

from collections.abc import Iterator

from polarlm.engine.backends.native.kernels.multiply import multiply, pieces
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector


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
        own = parts[number : number + part_tile]
        start = [[e.zero(vector(F32, lanes)) for _, lanes in own] for _ in range(rows)]
        sums = multiply(e, x, 4 * dim, matrix + 4 * own[0][0], 4 * dim, e.i64(dim), start)
        for (first, _), values in zip(own, zip(*sums, strict=True), strict=True):
            yield 4 * first, list(values)


def _hadamard(e: Emitter, x: Value, target: Value, after: Value, first: int, order: int) -> None:
    """The fast Walsh-Hadamard transform of `order` (a power of two) channels from `first` on, times `after`."""
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
        e.store(part * e.load(after, part.type, place), target, place)
