"""The codes of a block: rounding with error feedback between pairs, and between tokens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.native.kernels.encode.unit import LANES, ROW_PAD, Unit, add_chains
from engine.backends.native.kernels.nearest import Search
from engine.backends.native.values import F32, I32, Value, vector

_F16, _I16 = vector(F32, LANES), vector(I32, LANES)


def round_all_tokens(unit: Unit) -> None:
    """Round pair by pair; errors to `errors`."""
    e, width = unit.e, unit.width
    search = unit.encoding.table(e, unit.encoding.bits)
    unit.clear(unit.errors, unit.dim * unit.row)
    at_once = unit.at_once(8 // width)
    with e.loop(0, unit.pairs) as pair:
        rows = [unit.given["feedback"] + (pair * width + row) * (unit.dim * 4) for row in range(width)]
        before = (pair * width + 1) & -2  # an odd number of them is followed by coefficients of 0
        here = pair * unit.row_of_pairs
        with e.loop(0, unit.row, 64 * at_once) as offset:
            sources = [unit.errors + offset + 64 * number for number in range(at_once)]
            sums = unit.products(rows, sources, before)
            for row, by_source in enumerate(sums):
                for number, total in enumerate(by_source):
                    place = offset + (row * unit.row + 64 * number)
                    e.store(e.load(unit.x + here + place, _F16) + total, unit.target_of_pair + place)
        with unit.vectors() as offset:
            offsets = [offset + row * unit.row for row in range(width)]
            aims = [e.load(unit.target_of_pair + at, _F16) for at in offsets]
            points = _round(unit, search, aims, offset, pair)
            for at, point in zip(offsets, points, strict=True):
                e.store(e.load(unit.x + here + at, _F16) - point, unit.errors + here + at)


def _round(unit: Unit, search: Search, aims: Sequence[Value], offset: Value, row: Value) -> list[Value]:
    """The points nearest to the aims, times the norm; codes are stored in a row of `codes`."""
    e = unit.e
    inverse, norm = e.load(unit.inverses + offset, _F16), e.load(unit.norms + offset, _F16)
    found = search([aim * inverse for aim in aims])
    e.store(found.codes, unit.codes + row * unit.row + offset)
    return [point * norm for point in found.points]


def round_skewed(unit: Unit) -> None:
    """Round row by row of pairs, with feedback along tokens; targets to `x`, their errors to `errors`."""
    e, width = unit.e, unit.width
    search = unit.encoding.table(e, unit.encoding.bits)
    pad = unit.row_of_pairs + unit.row  # for what comes before the first pair, and before its first token
    nbytes = unit.encoding.rows(unit.pairs) * unit.row_of_pairs + pad
    targets, errors, target_errors = (unit.take(nbytes) + pad for _ in range(3))
    unit.clear(targets + -pad, nbytes * 3)
    _skew(unit, unit.x, targets)
    with e.loop(0, unit.encoding.rows(unit.pairs)) as row:
        here = row * unit.row_of_pairs
        first = e.most(row - unit.pairs + 1, 0) // LANES * 64
        last = e.least(row, e.i64(unit.tokens - 1)) * 4
        with unit.vectors(first, last + 1) as offset:
            pair = row - (offset >> 2)  # of the first token; the next has the one before
            at = here + offset
            xs = [e.load(targets + at, _F16, axis * unit.row) for axis in range(width)]
            from_tokens = _from_tokens(unit, errors + at, offset, row)
            own_targets = [x + total for x, total in zip(xs, from_tokens, strict=True)]
            from_pairs = _from_pairs(unit, target_errors + at, pair)
            aims = [target + total for target, total in zip(own_targets, from_pairs, strict=True)]
            points = _round(unit, search, aims, offset, row)
            lane = e.splat(pair.trunc(I32), LANES) - e.constant(_I16, tuple(range(LANES)))
            exists = (lane >= 0) & (lane < unit.pairs.trunc(I32))
            for axis, (x, target, point) in enumerate(zip(xs, own_targets, points, strict=True)):
                for array, error in ((errors, x - point), (target_errors, target - point)):
                    e.store(e.select(exists, error, e.zero(_F16)), array + at, axis * unit.row)
                e.store(target, targets + at, axis * unit.row)
    _skew(unit, targets, unit.x, back=True)
    _skew(unit, target_errors, unit.errors, back=True)


def _from_tokens(unit: Unit, errors: Value, offset: Value, row: Value) -> list[Value]:
    """What earlier tokens add to the targets of a row; errors: of the row; those tokens lie above it."""
    e = unit.e
    sums = [[e.variable(e.zero(_F16)) for _ in range(2)] for _ in range(unit.width)]
    with e.loop(1, e.least(offset >> 2, row - 15) + 16, 2) as lag:
        coefficients = unit.given["along"] + lag * unit.row + offset
        source = errors + -(lag * (unit.row_of_pairs + 4))
        for step in (0, 1):
            factor = e.load(coefficients, _F16, step * unit.row)
            for axis, by_step in enumerate(sums):
                error = e.load(source, _F16, axis * unit.row - step * (unit.row_of_pairs + 4))
                by_step[step].set(e.fma(factor, error, by_step[step].get()))
    return [add_chains(by_step) for by_step in sums]


def _from_pairs(unit: Unit, errors: Value, pair: Value) -> list[Value]:
    """What earlier pairs of the same tokens add to the aims; errors: of the row; those pairs lie above it."""
    e, width, diagonal = unit.e, unit.width, (unit.pairs + 2 * ROW_PAD) * 4
    sums = [[e.variable(e.zero(_F16)) for _ in range(2 * width)] for _ in range(width)]
    coefficients = unit.given["feedback"] + (unit.pairs - 1 - pair + ROW_PAD) * 4
    with e.loop(1, e.least(pair + 1, unit.pairs), 2) as lag:
        source, factors = errors + -(lag * unit.row_of_pairs), coefficients + lag * diagonal * width**2
        for step in (0, 1):
            for axis in range(width):
                error = e.load(source, _F16, axis * unit.row - step * unit.row_of_pairs)
                for own, chains in enumerate(sums):
                    factor = e.load(factors + diagonal * ((step * width + own) * width + axis), _F16)
                    chain = chains[2 * axis + step] if width > 1 else chains[step]
                    chain.set(e.fma(factor, error, chain.get()))
    return [add_chains(chains) for chains in sums]


def _skew(unit: Unit, source: Value, target: Value, *, back: bool = False) -> None:
    """Rows (D, N) of channels → skewed rows, or back."""
    e, step = unit.e, unit.row_of_pairs + 4
    with e.loop(0, unit.pairs) as pair, e.loop(0, unit.tokens, LANES) as token:
        plain = pair * unit.row_of_pairs + token * 4
        skewed = pair * unit.row_of_pairs + token * step
        for axis in range(unit.width):
            for number in range(LANES):
                places = 4 * number, step * number
                there, to = (skewed, plain) if back else (plain, skewed)
                read, write = reversed(places) if back else places
                value = e.load(source + there, F32, read + axis * unit.row)
                e.store(value, target + to, write + axis * unit.row)


def write_codes(unit: Unit, out: Value) -> None:
    """The codes in the rows of `codes` → (N, P) at `out`, uint8 or uint16."""
    e, size = unit.e, unit.encoding.code.width // 8
    step = unit.row + 4 if unit.encoding.along_tokens else 4  # from a token to the next
    with e.loop(0, unit.tokens) as token:
        source, target = unit.codes + token * step, out + token * unit.pairs * size
        with e.loop(0, unit.pairs, 4) as pair:
            for number in range(4):
                code = e.load(source + (pair + number) * unit.row, I32)
                e.store(code.trunc(unit.encoding.code), target + pair * size, number * size)
