"""Attention over a block in full precision: (N, D) float16, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I16, Value, vector

_TOKENS_AHEAD = 16  # prefetch distance in tokens


def _lanes(e: Emitter, dim: int) -> int:
    """Channels per vector: a divisor of D."""
    return min(e.level.lanes, dim & -dim)


def scores(
    e: Emitter,
    keys: Value,
    after: Value,
    dim: int,
    count: Value,
    query: Value,
    out: Value,
    queries: int,
    stride: int,
    widened: Value,
) -> None:
    """The scores of the first `count` tokens, rounded up to whole vectors, with each of the queries (D,) → `out`.

    after: the keys that are read next: their first tokens are prefetched while the last ones of this block are read.
    stride: bytes from query to query, and from scores to scores. widened: scratch for the keys of a vector of tokens as
    float32.
    """
    lanes, sums = _lanes(e, dim), min(16, dim & -dim)
    kind = vector(F32, lanes)
    lines = -(-2 * lanes * dim // (64 * queries))  # to prefetch with each query: many at once stall the core
    with e.loop(0, count, lanes) as token:
        following = token + lanes
        ahead = e.variable(e.select(following < count, keys + following * (2 * dim), after))
        with e.loop(0, lanes * dim, dim) as channel:
            for first in range(0, dim, lanes):
                halves = e.load(keys + (token * dim + channel) * 2, vector(I16, lanes), 2 * first)
                e.store(e.half_to_float(halves), widened + channel * 4, 4 * first)
        with e.loop(0, queries * stride, stride) as own:
            parts = []  # partial sums of a dot product: as many at every level, so that all levels add in one order
            for part in range(0, sums, lanes):
                dots = []
                for number in range(lanes):
                    for line in range(number * lines // lanes, (number + 1) * lines // lanes) if not part else ():
                        e.prefetch(ahead.get() + 64 * line, 64)
                    dot = e.zero(kind)
                    for offset in range(4 * part, 4 * dim, 4 * sums):
                        key = e.load(widened, kind, 4 * dim * number + offset)
                        dot = e.fma(key, e.load(query + own, kind, offset), dot)
                    dots.append(dot)
                parts.append(_sums(e, dots))
            ahead.set(ahead.get() + 64 * lines)
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            e.store(parts[0], out + own + token * 4)


def add_values(
    e: Emitter, values: Value, after: Value, dim: int, count: Value, weights: Sequence[Value], sums: Sequence[Value]
) -> None:
    """Add Σ weight · value over the first `count` tokens to each of the sums (D,). after: as in `scores`."""
    lanes = _lanes(e, dim)
    kind = vector(F32, lanes)
    size = lanes * max(1, e.level.registers // 2 // len(weights))
    distance = e.imin(count, _TOKENS_AHEAD)
    for first in range(0, dim, size):
        channels = range(first, min(first + size, dim), lanes)
        totals = [[e.variable(e.load(at, kind, 4 * channel)) for channel in channels] for at in sums]
        with e.loop(0, count) as token:
            if not first:
                ahead = token + distance
                is_own = ahead < count
                place = e.select(is_own, ahead, ahead - count) * (2 * dim)
                e.prefetch(e.select(is_own, values, after) + place, 2 * dim)
            halves = [e.load(values + token * (2 * dim), vector(I16, lanes), 2 * channel) for channel in channels]
            row = [e.half_to_float(own) for own in halves]
            for at, own in zip(weights, totals, strict=True):
                weight = e.broadcast(at + token * 4, F32, lanes)
                for value, total in zip(row, own, strict=True):
                    total.set(e.fma(value, weight, total.get()))
        for at, own in zip(sums, totals, strict=True):
            for channel, total in zip(channels, own, strict=True):
                e.store(total.get(), at, 4 * channel)


def _sums(e: Emitter, vectors: list[Value]) -> Value:
    """n vectors of n lanes → a vector of the sums of their lanes."""
    lanes = vectors[0].lanes
    while len(vectors) > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
        vectors = [e.shuffle(a, b, range(0, 2 * lanes, 2)) + e.shuffle(a, b, range(1, 2 * lanes, 2)) for a, b in pairs]
    return vectors[0]
