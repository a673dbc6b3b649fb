"""What a step does with blocks: online softmax of queries over their tokens; scores and values of a block in full
precision, (N, D) float16, token by token."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polarlm.engine.backends.native.kernels.attention.partials import LOWEST, padded
from polarlm.engine.backends.native.kernels.rows import apply_softcap
from polarlm.engine.jit.lang import F32, I16, I32, Emitter, Value, Values, Variable, vector

_F16 = vector(F32, 16)
_TOKENS_AHEAD = 16  # prefetch distance in tokens


@dataclass
class Query:
    """A query of a pass: addresses in scratch, its row's position, and the state of its softmax."""

    vector: Value  # already scaled
    prepared: Value
    scores: Value  # scores with the tokens of some blocks; then their weights
    weighted: Value  # sum of weighted values
    position: Value
    row_max: Variable
    row_sum: Variable  # partial sums in lanes


def for_each_token(e: Emitter, tokens: Value, block_size: int, body: Callable[[Sequence[int], Value], None]) -> None:
    """Emit body(offsets in bytes of vectors of 16 tokens, offset to add to these) for all tokens, a multiple of N."""
    step = next(size for size in (64, 48, 32, 16) if block_size % size == 0)
    with e.loop(0, tokens * 4, 4 * step) as first_offset:
        body(range(0, 4 * step, 64), first_offset)


def cap_scores(e: Emitter, queries: Sequence[Query], tokens: Value, block_size: int, cap: Value) -> None:
    """Scores s → cap · tanh(s / cap), in place."""
    limit = e.splat(cap, 16)

    def write(offsets: Sequence[int], first_offset: Value) -> None:
        for query in queries:
            for offset in offsets:
                address = query.scores + first_offset
                e.store(apply_softcap(e, e.load(address, _F16, offset), limit), address, offset)

    for_each_token(e, tokens, block_size, write)


def mask(e: Emitter, queries: Sequence[Query], lows: Values, highs: Values, tokens: Value) -> None:
    """Set scores to LOWEST outside low ≤ token < high, for the low and high of each query."""
    lanes = e.constant(vector(I32, 16), tuple(range(16)))
    for query, first, last in zip(queries, lows, highs, strict=True):
        low, high = e.imax(first, 0).trunc(I32), e.imax(last, 0).trunc(I32)
        with e.loop(0, tokens, 16) as token:
            numbers = lanes + token.trunc(I32)
            address = query.scores + token * 4
            is_visible = (numbers >= low) & (numbers < high)
            e.store(e.select(is_visible, e.load(address, _F16), e.constant(_F16, LOWEST)), address)


def softmax(e: Emitter, queries: Sequence[Query], tokens: Value, block_size: int, head_dim: int) -> None:
    """Scores → weights e^(score − row_max), in place; adds them to row_sum.

    If a score exceeds row_max, row_sum and the weighted sum are rescaled to the new maximum first.
    """
    highest = [e.variable(e.constant(_F16, LOWEST)) for _ in queries]

    def find(offsets: Sequence[int], first_offset: Value) -> None:
        for query, row_max in zip(queries, highest, strict=True):
            for offset in offsets:
                score = e.load(query.scores + first_offset, _F16, offset)
                row_max.set(e.select(score > row_max.get(), score, row_max.get()))

    for_each_token(e, tokens, block_size, find)
    maxima = [e.fmax_lanes(row_max.get()) for row_max in highest]
    exceeds = [row_max > query.row_max.get() for query, row_max in zip(queries, maxima, strict=True)]
    any_exceeds = exceeds[0]
    for other in exceeds[1:]:
        any_exceeds = any_exceeds | other
    with e.when(any_exceeds):
        for query, row_max in zip(queries, maxima, strict=True):
            new = e.fmax(row_max, query.row_max.get())
            rescale = e.exp(query.row_max.get() - new)
            query.row_max.set(new)
            query.row_sum.set(query.row_sum.get() * rescale)
            for offset in range(0, padded(head_dim), 64):
                e.store(e.load(query.weighted, _F16, offset) * rescale, query.weighted, offset)

    def weigh(offsets: Sequence[int], first_offset: Value) -> None:
        for query in queries:
            for offset in offsets:
                weight = e.exp(e.load(query.scores + first_offset, _F16, offset) - query.row_max.get())
                e.store(weight, query.scores + first_offset, offset)
                query.row_sum.add(weight)

    for_each_token(e, tokens, block_size, weigh)


def _lanes(e: Emitter, dim: int) -> int:
    """Channels per vector: a divisor of D."""
    return min(e.level.lanes, dim & -dim)


def full_scores(
    e: Emitter,
    keys: Value,
    next_keys: Value,
    dim: int,
    count: Value,
    query: Value,
    out: Value,
    queries: int,
    stride: int,
    key_floats: Value,
) -> None:
    """The scores of the first `count` tokens, rounded up to whole vectors, with each of the queries (D,) → `out`.

    next_keys: the keys that are read next: their first tokens are prefetched while the last ones of this block are
    read.
    stride: bytes from query to query, and from scores to scores. key_floats: scratch, float32 keys of a vector of
    tokens.
    """
    lanes, sums = _lanes(e, dim), min(16, dim & -dim)
    kind = vector(F32, lanes)
    lines = -(-2 * lanes * dim // (64 * queries))  # to prefetch with each query: many at once stall the core
    with e.loop(0, count, lanes) as token:
        next_token = token + lanes
        prefetch_address = e.variable(e.select(next_token < count, keys + next_token * (2 * dim), next_keys))
        with e.loop(0, lanes * dim, dim) as channel:
            for first in range(0, dim, lanes):
                halves = e.load(keys + (token * dim + channel) * 2, vector(I16, lanes), 2 * first)
                e.store(e.half_to_float(halves), key_floats + channel * 4, 4 * first)
        with e.loop(0, queries * stride, stride) as query_offset:
            parts = []  # partial sums of a dot product: as many at every level, so that all levels add in one order
            for part in range(0, sums, lanes):
                dots = []
                for number in range(lanes):
                    for line in range(number * lines // lanes, (number + 1) * lines // lanes) if not part else ():
                        e.prefetch(prefetch_address.get() + 64 * line, 64)
                    dot = e.zero(kind)
                    for offset in range(4 * part, 4 * dim, 4 * sums):
                        key = e.load(key_floats, kind, 4 * dim * number + offset)
                        dot = e.fma(key, e.load(query + query_offset, kind, offset), dot)
                    dots.append(dot)
                parts.append(e.combine_rows(dots, operator.add))
            prefetch_address.set(prefetch_address.get() + 64 * lines)
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            e.store(parts[0], out + query_offset + token * 4)


def add_full_values(
    e: Emitter, values: Value, next_keys: Value, dim: int, count: Value, weights: Values, sums: Values
) -> None:
    """Add Σ weight · value over the first `count` tokens to each of the sums (D,). next_keys: as in `full_scores`."""
    lanes = _lanes(e, dim)
    kind = vector(F32, lanes)
    size = lanes * max(1, e.level.registers // 2 // len(weights))
    distance = e.imin(count, _TOKENS_AHEAD)
    for first in range(0, dim, size):
        channels = range(first, min(first + size, dim), lanes)
        totals = [[e.variable(e.load(address, kind, 4 * channel)) for channel in channels] for address in sums]
        with e.loop(0, count) as token:
            if not first:
                prefetch_address = token + distance
                is_own = prefetch_address < count
                place = e.select(is_own, prefetch_address, prefetch_address - count) * (2 * dim)
                e.prefetch(e.select(is_own, values, next_keys) + place, 2 * dim)
            halves = [e.load(values + token * (2 * dim), vector(I16, lanes), 2 * channel) for channel in channels]
            row = [e.half_to_float(half) for half in halves]
            for address, row_totals in zip(weights, totals, strict=True):
                weight = e.broadcast(address + token * 4, F32, lanes)
                for value, total in zip(row, row_totals, strict=True):
                    total.set(e.fma(value, weight, total.get()))
        for address, row_totals in zip(sums, totals, strict=True):
            for channel, total in zip(channels, row_totals, strict=True):
                e.store(total.get(), address, 4 * channel)
