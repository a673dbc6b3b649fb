"""Rotations of vectors of D channels, which are emitted into other kernels."""

from __future__ import annotations

from collections.abc import Iterator

from engine.backends.native.emit import Emitter
from engine.backends.native.values import F32, Value, vector

_AT_ONCE = 4  # results of 16 channels that a product with a matrix sums up together


def pieces(channels: int) -> Iterator[tuple[int, int]]:
    """(first channel, lanes) of the vectors of at most 16 lanes that cover the channels."""
    first = 0
    for lanes in (16, 8, 4, 2, 1):
        while channels - first >= lanes:
            yield first, lanes
            first += lanes


def rotate(e: Emitter, x: Value, target: Value, memory: Value, dim: int, order: int) -> None:
    """x (D,) @ rotation → target (D,), float32; order and memory: of a `Rotation`. target may be x unless order is 0.

    For a Hadamard matrix, x has been multiplied by the signs before it.
    """
    if order == 1:
        for first, lanes in pieces(dim):
            e.store(e.load(x, vector(F32, lanes), 4 * first), target, 4 * first)
    elif order == 0:
        _multiply(e, x, target, memory, dim)
    else:
        for first in range(0, dim, order):
            _hadamard(e, x, target, memory, first, order)


def _multiply(e: Emitter, x: Value, target: Value, matrix: Value, dim: int) -> None:
    parts = list(pieces(dim))
    for number in range(0, len(parts), _AT_ONCE):
        own = parts[number : number + _AT_ONCE]
        sums = [e.variable(e.zero(vector(F32, lanes))) for _, lanes in own]
        with e.loop(0, dim) as row:
            factor, weights = e.load(x + row * 4, F32), matrix + row * (4 * dim)
            for (first, lanes), total in zip(own, sums, strict=True):
                weight = e.load(weights, vector(F32, lanes), 4 * first)
                total.set(e.fma(weight, factor, total.get()))
        for (first, _), total in zip(own, sums, strict=True):
            e.store(total.get(), target, 4 * first)


def _hadamard(e: Emitter, x: Value, target: Value, after: Value, first: int, order: int) -> None:
    """The fast Walsh-Hadamard transform of `order` channels, a power of two, times `after`."""
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
