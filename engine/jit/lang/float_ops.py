"""Lookups of floats in memory, and their conversion to halves and to integers: the same results at every level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from llvmlite import ir

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, F64, I32, I64, Type, Value, vector

_LEAST = 1e-34  # 32767 divided by less is infinite


def gather(e: Emitter, pointer: Value, index: Value, element: Type) -> Value:
    """A vector of numbers of a table in memory; index: int32 lanes, not negative."""
    step = element.width // 8 if isinstance(element, ir.IntType) else 8 if element == F64 else 4
    lanes = [e.extract(index, lane).zext(I64) * step for lane in range(index.lanes)]
    return e.collect([e.load(pointer + lane, element) for lane in lanes])


def gather_pairs(e: Emitter, pointer: Value, index: Value) -> list[Value]:
    """`gather` of pairs of float32 that lie side by side → a vector of the first and one of the second numbers."""
    lanes = index.lanes
    both = gather(e, pointer, index, F64).bits(vector(F32, 2 * lanes))
    return [e.shuffle(both, both, range(first, 2 * lanes, 2)) for first in (0, 1)]


def float_to_half(e: Emitter, x: Value) -> Value:
    """Finite float32 of magnitude below 65520 → the nearest float16, ties to even, as int16."""
    return e.level.float_to_half(e, x)


def round_to(e: Emitter, parts: Sequence[Value], limit: float) -> tuple[list[Value], Value]:
    """Vectors of float32, scaled so that the largest magnitude becomes `limit` ≤ 32767, as int32; and that magnitude.

    All are 0 if it is at most 1e-34. It is NaN if one of them is, so that products with it are.
    """
    bits = vector(I32, parts[0].lanes)
    # Magnitudes are in the order of their bits, with NaN above infinity. A maximum of floats would pass over NaN.
    magnitudes = [e.absolute(part).bits(bits) for part in parts]
    top = e.most_lanes(reduce(e.most, magnitudes)).bits(F32)
    inverse = e.select(top > _LEAST, e.like(limit, top) / top, e.zero(F32))
    return [e.round(part * inverse) for part in parts], top
