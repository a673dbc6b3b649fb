"""Online softmax of queries over the tokens of one or more blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polarlm.engine.backends.native.kernels.attention.partials import LOWEST, padded
from polarlm.engine.backends.native.kernels.rows import capped
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I32, Value, Variable, vector

_F16 = vector(F32, 16)


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


def _over_tokens(e: Emitter, tokens: Value, block_size: int, body: Callable[[Sequence[int], Value], None]) -> None:
    """Emit body(offsets in bytes of vectors of 16 tokens, offset to add to these) for all tokens, a multiple of N."""
    step = next(size for size in (64, 48, 32, 16) if block_size % size == 0)
    with e.loop(0, tokens * 4, 4 * step) as before:
        body(range(0, 4 * step, 64), before)


def cap_scores(e: Emitter, queries: Sequence[Query], tokens: Value, block_size: int, cap: Value) -> None:
    """Scores s → cap · tanh(s / cap), in place."""
    limit = e.splat(cap, 16)

    def write(offsets: Sequence[int], before: Value) -> None:
        for query in queries:
            for offset in offsets:
                at = query.scores + before
                e.store(capped(e, e.load(at, _F16, offset), limit), at, offset)

    _over_tokens(e, tokens, block_size, write)


def mask(e: Emitter, queries: Sequence[Query], lows: Sequence[Value], highs: Sequence[Value], tokens: Value) -> None:
    """Set scores to LOWEST outside low ≤ token < high, for the low and high of each query."""
    lanes = e.constant(vector(I32, 16), tuple(range(16)))
    for query, first, last in zip(queries, lows, highs, strict=True):
        low, high = e.imax(first, 0).trunc(I32), e.imax(last, 0).trunc(I32)
        with e.loop(0, tokens, 16) as token:
            numbers = lanes + token.trunc(I32)
            at = query.scores + token * 4
            seen = (numbers >= low) & (numbers < high)
            e.store(e.select(seen, e.load(at, _F16), e.constant(_F16, LOWEST)), at)


def softmax(e: Emitter, queries: Sequence[Query], tokens: Value, block_size: int, head_dim: int) -> None:
    """Scores → weights e^(score − row_max), in place; adds them to row_sum.

    If a score exceeds row_max, row_sum and the weighted sum are rescaled to the new maximum first.
    """
    highest = [e.variable(e.constant(_F16, LOWEST)) for _ in queries]

    def find(offsets: Sequence[int], before: Value) -> None:
        for query, row_max in zip(queries, highest, strict=True):
            for offset in offsets:
                score = e.load(query.scores + before, _F16, offset)
                row_max.set(e.select(score > row_max.get(), score, row_max.get()))

    _over_tokens(e, tokens, block_size, find)
    maxima = [e.fmax_lanes(row_max.get()) for row_max in highest]
    grown = [row_max > query.row_max.get() for query, row_max in zip(queries, maxima, strict=True)]
    some = grown[0]
    for other in grown[1:]:
        some = some | other
    with e.when(some):
        for query, row_max in zip(queries, maxima, strict=True):
            new = e.fmax(row_max, query.row_max.get())
            rescale = e.exp(query.row_max.get() - new)
            query.row_max.set(new)
            query.row_sum.set(query.row_sum.get() * rescale)
            for offset in range(0, padded(head_dim), 64):
                e.store(e.load(query.weighted, _F16, offset) * rescale, query.weighted, offset)

    def weigh(offsets: Sequence[int], before: Value) -> None:
        for query in queries:
            for offset in offsets:
                weight = e.exp(e.load(query.scores + before, _F16, offset) - query.row_max.get())
                e.store(weight, query.scores + before, offset)
                query.row_sum.add(weight)

    _over_tokens(e, tokens, block_size, weigh)
