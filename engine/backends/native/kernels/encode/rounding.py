"""Rounding of a block to codes, with error feedback between pairs, with one norm or the best of several, or without
feedback."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from polarlm.engine.backends.native.kernels.encode.norms import write_norms
from polarlm.engine.backends.native.kernels.encode.unit import LANES, Unit
from polarlm.engine.jit.lang.values import F32, I32, Value, vector

_F16, _I16 = vector(F32, LANES), vector(I32, LANES)


def round_with_best_norms(unit: Unit, round_: Callable[[Unit], None]) -> None:
    """Round with each of `norm_factors` times the RMS; the codes and norms of least cost → `codes` and `norms`."""
    e = unit.e
    factors = e.constant_bytes(np.array(unit.encoding.norm_factors, "<f4").tobytes())
    with unit.vectors() as offset:
        e.store(e.load(unit.norms + offset, _F16), unit.rms + offset)
        e.store(e.constant(_F16, float(np.finfo(np.float32).max)), unit.least + offset)
    with e.loop(0, len(unit.encoding.norm_factors)) as number:
        factor = e.broadcast(factors + number * 4, F32, LANES)
        with unit.vectors() as offset:
            norm = e.load(unit.rms + offset, _F16) * factor
            e.store(norm, unit.norms + offset)
            e.store(e.select(norm > 0.0, e.constant(_F16, 1.0) / norm, e.zero(_F16)), unit.inverses + offset)
        round_(unit)
        write_norms(unit)
        with unit.vectors() as offset:
            cost, least = e.load(unit.costs + offset, _F16), e.load(unit.least + offset, _F16)
            is_better = cost < least
            e.store(e.select(is_better, cost, least), unit.least + offset)
            norms, best = e.load(unit.norms + offset, _F16), unit.best_norms + offset
            e.store(e.select(is_better, norms, e.load(best, _F16)), best)
            with e.loop(0, unit.pairs) as pair:
                at = pair * unit.row + offset
                codes, best = e.load(unit.codes + at, _I16), unit.best_codes + at
                e.store(e.select(is_better, codes, e.load(best, _I16)), best)
    unit.codes, unit.norms = unit.best_codes, unit.best_norms


def round_all_tokens(unit: Unit) -> None:
    """Round pair by pair, all tokens at once → `codes`, and the errors of `x` → `errors`."""
    e, width = unit.e, unit.width
    search = unit.encoding.table(e, unit.encoding.bits)
    unit.clear(unit.errors, unit.dim * unit.row)
    vector_tile = unit.vector_tile(8 // width)
    with e.loop(0, unit.pairs) as pair:
        rows = [unit.block.feedback + (pair * width + row) * (unit.dim * 4) for row in range(width)]
        before = (pair * width + 1) & -2  # rounded up to even: the coefficient after an odd number is 0
        here = pair * unit.row_of_pairs
        with e.loop(0, unit.row, 64 * vector_tile) as offset:
            sources = [unit.errors + offset + 64 * number for number in range(vector_tile)]
            sums = unit.products(rows, sources, before)
            for row, by_source in enumerate(sums):
                for number, total in enumerate(by_source):
                    place = offset + (row * unit.row + 64 * number)
                    e.store(e.load(unit.x + here + place, _F16) + total, unit.target_of_pair + place)
        with unit.vectors() as offset:
            offsets = [offset + row * unit.row for row in range(width)]
            aims = [e.load(unit.target_of_pair + at, _F16) for at in offsets]
            norm, inverse = e.load(unit.norms + offset, _F16), e.load(unit.inverses + offset, _F16)
            found = search([aim * inverse for aim in aims])
            e.store(found.codes, unit.codes + pair * unit.row + offset)
            points = [point * norm for point in found.points]
            for at, point in zip(offsets, points, strict=True):
                e.store(e.load(unit.x + here + at, _F16) - point, unit.errors + here + at)


def round_alone(unit: Unit) -> None:
    """Round without feedback, as `Codec.encode` does; norms are limited to `Encoding.largest`."""
    e = unit.e
    search = unit.encoding.table(e, unit.encoding.bits)
    with unit.vectors() as offset:
        norm = e.load(unit.norms + offset, _F16)
        if unit.encoding.largest < math.inf:
            norm = e.fmin(norm, unit.encoding.largest)
            e.store(norm, unit.norms + offset)
        divisor = e.select(norm > 0.0, norm, e.constant(_F16, 1.0))
        with e.loop(0, unit.pairs) as pair:
            source = unit.x + pair * unit.row_of_pairs + offset
            found = search([e.load(source, _F16, axis * unit.row) / divisor for axis in range(unit.width)])
            e.store(found.codes, unit.codes + pair * unit.row + offset)


def write_codes(unit: Unit, out: Value) -> None:
    """Transpose the codes in the rows of `codes` → (N, P) at `out`, uint8, or uint16 for ten bits."""
    e, size = unit.e, unit.encoding.code.width // 8
    row = unit.row_of_lanes + 4 if unit.encoding.along_tokens else e.i64(unit.row)  # bytes from pair to pair
    step = unit.row_of_lanes if unit.encoding.along_tokens else 4  # bytes from token to token
    with e.loop(0, unit.tokens) as token:
        source, target = unit.codes + token * step, out + token * unit.pairs * size
        with e.loop(0, unit.pairs, 4) as pair:
            for number in range(4):
                code = e.load(source + row * (pair + number), I32)
                e.store(code.trunc(unit.encoding.code), target + pair * size, number * size)
