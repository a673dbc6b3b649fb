"""Gathers of floats from memory, and their conversion to float16 and to integers. Results are equal at every level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from llvmlite import ir

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, F64, I32, I64, Type, Value, vector

_LEAST = 1e-34  # 32767 divided by a smaller number overflows


def gather(e: Emitter, pointer: Value, index: Value, element: Type) -> Value:
    """The numbers of a table in memory at the indices `index` (int32 lanes ≥ 0), as a vector."""
    step = element.width // 8 if isinstance(element, ir.IntType) else 8 if element == F64 else 4
    lanes = [e.extract(index, lane).zext(I64) * step for lane in range(index.lanes)]
    return e.collect([e.load(pointer + lane, element) for lane in lanes])


def gather_pairs(e: Emitter, pointer: Value, index: Value) -> list[Value]:
    """`gather` of adjacent pairs of float32 → a vector of the first numbers, and one of the second."""
    lanes = index.lanes
    both = gather(e, pointer, index, F64).bits(vector(F32, 2 * lanes))
    return [e.shuffle(both, both, range(first, 2 * lanes, 2)) for first in (0, 1)]


def float_to_half(e: Emitter, x: Value) -> Value:
    """Finite float32 of magnitude below 65520 → the nearest float16, ties to even, as int16."""
    return e.level.float_to_half(e, x)


def round_to(e: Emitter, parts: Sequence[Value], limit: float) -> tuple[list[Value], Value]:
    """Vectors of float32 → int32, scaled so that the largest magnitude becomes `limit` ≤ 32767; and that magnitude.

    The int32 are all 0 if it is at most 1e-34. It is NaN if any number is, so that products with it are NaN too.
    """
    top = largest(e, parts)
    return scaled_to(e, parts, top, limit), top


def largest(e: Emitter, parts: Sequence[Value]) -> Value:
    """The largest magnitude of float32 in vectors; NaN if any number is."""
    bits = vector(I32, parts[0].lanes)
    # Magnitudes compare like their bits, with NaN above infinity. A maximum of floats would ignore NaN.
    magnitudes = [e.absolute(part).bits(bits) for part in parts]
    return e.imax_lanes(reduce(e.imax, magnitudes)).bits(F32)


def scaled_to(e: Emitter, parts: Sequence[Value], top: Value, limit: float) -> list[Value]:
    """Vectors of float32 → int32, scaled so that `top` would become `limit` ≤ 32767; 0 if it is at most 1e-34."""
    inverse = e.select(top > _LEAST, e.like(limit, top) / top, e.zero(F32))
    return [e.round(part * inverse) for part in parts]
