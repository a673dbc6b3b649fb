"""Rounding of a block to codes, with error feedback between pairs and along tokens.

Rows are skewed: row d has pair j of token d − j in lane j. All cells of a row are rounded at once. They need errors of
earlier rows: the error of pair j − k of the same token is in row d − k, lane j − k; the error of pair j of token t − m
is in row d − m, lane j.
"""

from __future__ import annotations

from polarlm.engine.backends.native.kernels.encode.unit import LANES, ROW_PAD, Unit, add_chains
from polarlm.engine.jit.lang import F32, I32, Value, vector

_F16, _I16 = vector(F32, LANES), vector(I32, LANES)


def round_skewed(unit: Unit) -> None:
    """Round row by row → `codes`; targets (x plus feedback along tokens) → `x`, and their errors → `errors`."""
    e, width, row_bytes = unit.e, unit.width, unit.row_of_lanes * unit.width
    search = unit.encoding.table(e, unit.encoding.bits)
    pad = row_bytes + unit.row_of_lanes  # zeros that are read for rows and lanes before the first
    nbytes = row_bytes * unit.encoding.rows(unit.pairs) + pad
    targets, errors, target_errors = (unit.take(nbytes) + pad for _ in range(3))
    unit.clear(targets + -pad, nbytes * 3)
    _skew(unit, unit.x, targets)
    norms, inverses = _reversed(unit, unit.norms), _reversed(unit, unit.inverses)
    axes = [unit.row_of_lanes * axis for axis in range(width)]
    with e.loop(0, unit.encoding.rows(unit.pairs)) as row:
        first = e.imax(row - (unit.tokens - 1), 0) // LANES * LANES
        with e.loop(first, e.imin(row + 1, unit.pairs), LANES) as pair:
            token = row - pair  # the first lane's token; each next lane has the one before it
            at = row_bytes * row + pair * 4
            places = [at + axis for axis in axes]
            xs = [e.load(targets + place, _F16) for place in places]
            from_tokens = _from_tokens(unit, errors + at, token)
            own_targets = [x + total for x, total in zip(xs, from_tokens, strict=True)]
            from_pairs = _from_pairs(unit, target_errors + at, row, pair)
            own = (-token + (ROW_PAD + unit.tokens - 1)) * 4
            inverse, norm = e.load(inverses + own, _F16), e.load(norms + own, _F16)
            found = search([(x + total) * inverse for x, total in zip(own_targets, from_pairs, strict=True)])
            e.store(found.codes, unit.codes + unit.row_of_lanes * row + pair * 4)
            lane = e.splat(token.trunc(I32), LANES) - e.constant(_I16, tuple(range(LANES)))
            exists = (lane >= 0) & (lane < unit.tokens)
            for place, x, target, point in zip(places, xs, own_targets, found.points, strict=True):
                for array, error in ((errors, x - point * norm), (target_errors, target - point * norm)):
                    e.store(e.select(exists, error, e.zero(_F16)), array + place)
                e.store(target, targets + place)
    _skew(unit, targets, unit.x, back=True)
    _skew(unit, target_errors, unit.errors, back=True)


def _reversed(unit: Unit, numbers: Value) -> Value:
    """Numbers (N,) float32 of tokens → the address of ROW_PAD zeros, the numbers in reverse order, ROW_PAD zeros."""
    e, out = unit.e, unit.take(unit.row + 8 * ROW_PAD)
    unit.clear(out, e.i64(unit.row + 8 * ROW_PAD))
    with unit.vectors() as offset:
        value = e.load(numbers + offset, _F16)
        e.store(e.shuffle(value, value, range(LANES - 1, -1, -1)), out + unit.row + -offset)
    return out


def _from_tokens(unit: Unit, errors: Value, token: Value) -> list[Value]:
    """Error feedback from earlier tokens to 16 cells. errors: address of these cells; token: the first cell's."""
    e, width, diagonal = unit.e, unit.width, 4 * unit.tokens + 8 * ROW_PAD
    sums = [[e.variable(e.zero(_F16)) for _ in range(2)] for _ in range(width)]
    coefficients = unit.block.along + (-token + (ROW_PAD + unit.tokens - 1)) * 4
    with e.loop(1, e.imin(token + 1, e.i64(unit.tokens)), 2) as lag:
        factors = coefficients + lag * diagonal
        for step in (0, 1):
            factor = e.load(factors, _F16, step * diagonal)
            source = errors + -((lag + step) * width) * unit.row_of_lanes
            for axis, by_step in enumerate(sums):
                error = e.load(source + unit.row_of_lanes * axis, _F16)
                by_step[step].set(e.fma(factor, error, by_step[step].get()))
    return [add_chains(by_step) for by_step in sums]


def _from_pairs(unit: Unit, errors: Value, row: Value, pair: Value) -> list[Value]:
    """Error feedback from earlier pairs of their tokens to 16 cells. errors: their address; pair: the first cell's."""
    e, width, diagonal = unit.e, unit.width, unit.row_of_lanes
    sums = [[e.variable(e.zero(_F16)) for _ in range(2 * width)] for _ in range(width)]
    coefficients = unit.block.feedback + pair * 4
    lags = e.imin(e.imin(pair + (LANES - 1), unit.pairs - 1), row)
    with e.loop(1, lags + 1, 2) as lag:
        for step in (0, 1):
            back = -(lag + step)
            source = errors + (diagonal * width * back + back * 4)
            factors = coefficients + diagonal * (width * width) * (lag + step)
            for axis in range(width):
                error = e.load(source + diagonal * axis, _F16)
                for own, chains in enumerate(sums):
                    factor = e.load(factors + diagonal * (own * width + axis), _F16)
                    chain = chains[2 * axis + step] if width > 1 else chains[step]
                    chain.set(e.fma(factor, error, chain.get()))
    return [add_chains(chains) for chains in sums]


def _skew(unit: Unit, source: Value, target: Value, *, back: bool = False) -> None:
    """Rows of channels (D, N) → skewed rows; with `back`, the inverse."""
    e, step = unit.e, unit.row_of_lanes * unit.width
    with e.loop(0, unit.pairs) as pair, e.loop(0, unit.tokens, LANES) as token:
        for axis in range(unit.width):
            plain = pair * unit.row_of_pairs + token * 4 + axis * unit.row
            skewed = step * (pair + token) + pair * 4 + unit.row_of_lanes * axis
            for _ in range(LANES):
                value = e.load(source + (skewed if back else plain), F32)
                e.store(value, target + (plain if back else skewed))
                plain, skewed = plain + 4, skewed + step
