"""Attention over a block in full precision: (N, D) float32, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.native.emit import Emitter
from engine.backends.native.values import F32, Value, vector


def _lanes(e: Emitter, dim: int) -> int:
    """Channels in a vector: a divisor of D."""
    return min(e.level.lanes, dim & -dim)


def scores(
    e: Emitter, keys: Value, after: Value, dim: int, count: Value, query: Value, out: Value, queries: int, stride: int
) -> None:
    """The scores of the first `count` tokens, and perhaps of some more, with each of the queries (D,).

    after: a block that is needed soon, which is prefetched while this one is read. stride: bytes from one query to the
    next, and from one's scores to the next one's.
    """
    lanes = _lanes(e, dim)
    kind = vector(F32, lanes)
    with e.loop(0, count, lanes) as token:
        e.prefetch(after + token * (4 * dim), 4 * lanes * dim)
        with e.loop(0, queries * stride, stride) as own:
            dots = []
            for number in range(lanes):
                row, dot = keys + (token + number) * (4 * dim), e.zero(kind)
                for offset in range(0, 4 * dim, 4 * lanes):
                    dot = e.fma(e.load(row, kind, offset), e.load(query + own, kind, offset), dot)
                dots.append(dot)
            e.store(_sums(e, dots), out + own + token * 4)


def mix(
    e: Emitter, values: Value, after: Value, dim: int, count: Value, weights: Sequence[Value], sums: Sequence[Value]
) -> None:
    """Add the values of the first `count` tokens, by each of the weights, to each of the sums (D,). after: as above."""
    lanes = _lanes(e, dim)
    kind = vector(F32, lanes)
    size = 4 * lanes * max(1, e.level.registers // 2 // len(weights))
    for first in range(0, 4 * dim, size):
        offsets = range(first, min(first + size, 4 * dim), 4 * lanes)
        totals = [[e.variable(e.load(at, kind, offset)) for offset in offsets] for at in sums]
        with e.loop(0, count) as token:
            place = token * (4 * dim)
            if not first:
                e.prefetch(after + place, 4 * dim)
            row = [e.load(values + place, kind, offset) for offset in offsets]
            for at, own in zip(weights, totals, strict=True):
                weight = e.broadcast(at + token * 4, F32, lanes)
                for value, total in zip(row, own, strict=True):
                    total.set(e.fma(value, weight, total.get()))
        for at, own in zip(sums, totals, strict=True):
            for offset, total in zip(offsets, own, strict=True):
                e.store(total.get(), at, offset)


def _sums(e: Emitter, vectors: list[Value]) -> Value:
    """The sum of the lanes of each vector, as lanes; as many vectors as they have lanes."""
    lanes = vectors[0].lanes
    while len(vectors) > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        vectors = [e.shuffle(a, b, range(0, 2 * lanes, 2)) + e.shuffle(a, b, range(1, 2 * lanes, 2)) for a, b in pairs]
    return vectors[0]
