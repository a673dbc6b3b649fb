"""Rows of a span, block by block, in kernels of gated delta rules and of Mamba 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I32, I64, Value


class Span(NamedTuple):
    """See `engine.backends.delta.DeltaSpan`."""

    slot: Value
    first: Value  # row
    rows: Value
    place: Value  # of the first row's token in its block


def span_of(e: Emitter, spans: Value, number: Value) -> Span:
    """The span of this number among those at the address `spans`."""
    at = spans + number * 16
    return Span(*(e.load(at + 4 * field, I32).sext(I64) for field in range(4)))


def by_blocks(e: Emitter, block: int, span: Span, body: Callable[[Value, Value, Value, Value], None]) -> None:
    """Emit body(first row, rows, place, number of the block) for the rows of each block of a span."""
    row, left, place, number = (e.variable(value) for value in (span.first, span.rows, span.place, e.i64(0)))
    with e.repeat_while() as condition:
        now = e.imin(left.get(), -place.get() + block)
        body(row.get(), now, place.get(), number.get())
        row.add(now)
        left.add(-now)
        place.set(e.i64(0))
        number.add(1)
        condition.append(left.get() > 0)


def kept_row(e: Emitter, kept: Value, blocks: Value, number: Value) -> Value:
    """The row in which the state after a block is kept, or −1. kept: the address of the rows of `blocks` blocks."""
    row = e.variable(e.i64(-1))
    with e.when(number < blocks):
        row.set(e.load(kept + number * 4, I32).sext(I64))
    return row.get()
