"""The online softmax of queries over the tokens of some blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polarlm.engine.backends.native.kernels.partials import LOWEST, padded
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I32, Value, Variable, vector

_F16 = vector(F32, 16)


@dataclass
class Query:
    """A query of a pass: addresses in scratch, its row's position, and what has been found for it so far."""

    vector: Value  # times the scale of scores
    prepared: Value
    scores: Value  # of some blocks; then their weights
    mix: Value
    position: Value
    top: Variable
    total: Variable  # lanes, to be added up


def _over_tokens(e: Emitter, tokens: Value, block_size: int, body: Callable[[Sequence[int], Value], None]) -> None:
    """body(offsets in bytes of vectors of 16 tokens, offset before these): for all tokens, a multiple of N."""
    step = next(size for size in (64, 48, 32, 16) if block_size % size == 0)
    with e.loop(0, tokens * 4, 4 * step) as before:
        body(range(0, 4 * step, 64), before)


def hide(e: Emitter, queries: Sequence[Query], lows: Sequence[Value], highs: Sequence[Value], tokens: Value) -> None:
    """Hide the tokens below those of `lows`, and from those of `highs` on."""
    lanes = e.constant(vector(I32, 16), tuple(range(16)))
    for query, first, last in zip(queries, lows, highs, strict=True):
        low, high = e.most(first, 0).trunc(I32), e.most(last, 0).trunc(I32)
        with e.loop(0, tokens, 16) as token:
            numbers = lanes + token.trunc(I32)
            at = query.scores + token * 4
            seen = (numbers >= low) & (numbers < high)
            e.store(e.select(seen, e.load(at, _F16), e.constant(_F16, LOWEST)), at)


def soften(e: Emitter, queries: Sequence[Query], tokens: Value, block_size: int, head_dim: int) -> None:
    """Scores → weights, in place; tops, totals and mixes as they need.

    Where a score is above the top so far, what was found before fades.
    """
    highest = [e.variable(e.constant(_F16, LOWEST)) for _ in queries]

    def find(offsets: Sequence[int], before: Value) -> None:
        for query, top in zip(queries, highest, strict=True):
            for offset in offsets:
                score = e.load(query.scores + before, _F16, offset)
                top.set(e.select(score > top.get(), score, top.get()))

    _over_tokens(e, tokens, block_size, find)
    tops = [e.maximum_lanes(top.get()) for top in highest]
    grown = [top > query.top.get() for query, top in zip(queries, tops, strict=True)]
    some = grown[0]
    for other in grown[1:]:
        some = some | other
    with e.when(some):
        for query, top in zip(queries, tops, strict=True):
            new = e.maximum(top, query.top.get())
            fade = e.exp(query.top.get() - new)
            query.top.set(new)
            query.total.set(query.total.get() * fade)
            for offset in range(0, padded(head_dim), 64):
                e.store(e.load(query.mix, _F16, offset) * fade, query.mix, offset)

    def weigh(offsets: Sequence[int], before: Value) -> None:
        for query in queries:
            for offset in offsets:
                weight = e.exp(e.load(query.scores + before, _F16, offset) - query.top.get())
                e.store(weight, query.scores + before, offset)
                query.total.add(weight)

    _over_tokens(e, tokens, block_size, weigh)
