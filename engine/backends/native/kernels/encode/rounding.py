"""Rounding of a block to codes: with error feedback between pairs and the best of several norms, or without either."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.native.kernels.encode.nearest import search
from polarlm.engine.backends.native.kernels.encode.unit import LANES, Unit
from polarlm.engine.jit.lang import F32, I32, Emitter, Value, Values, vector
from polarlm.engine.quantization.encode import TILT_RANGE, norm_factors

_F16, _I16 = vector(F32, LANES), vector(I32, LANES)


def round_with_best_norms(unit: Unit) -> None:
    """Round with each of `norm_factors` times the RMS; the codes and norms of least cost → `codes` and `norms`."""
    e, tried = unit.e, norm_factors(unit.encoding.tilted)
    factors = e.constant_bytes(np.array(tried, "<f4").tobytes())
    with unit.vectors() as offset:
        e.store(e.load(unit.norms + offset, _F16), unit.rms + offset)
        e.store(e.constant(_F16, float(np.finfo(np.float32).max)), unit.least + offset)
    _weigh_x(unit)
    with e.loop(0, len(tried)) as number:
        factor = e.broadcast(factors + number * 4, F32, LANES)
        with unit.vectors() as offset:
            norm = e.load(unit.rms + offset, _F16) * factor
            e.store(norm, unit.norms + offset)
            e.store(e.select(norm > 0.0, e.constant(_F16, 1.0) / norm, e.zero(_F16)), unit.inverses + offset)
        _round_all_tokens(unit)
        _fit_norms(unit)
        with unit.vectors() as offset:
            cost, least = e.load(unit.costs + offset, _F16), e.load(unit.least + offset, _F16)
            is_better = cost < least
            e.store(e.select(is_better, cost, least), unit.least + offset)
            norms, best = e.load(unit.norms + offset, _F16), unit.best_norms + offset
            e.store(e.select(is_better, norms, e.load(best, _F16)), best)
            with e.loop(0, unit.pairs) as pair:
                start = pair * unit.row + offset
                codes, best = e.load(unit.codes + start, _I16), unit.best_codes + start
                e.store(e.select(is_better, codes, e.load(best, _I16)), best)
    unit.codes, unit.norms = unit.best_codes, unit.best_norms


def _round_all_tokens(unit: Unit) -> None:
    """Round pair by pair, all tokens at once → `codes`, and the errors of `x` → `errors`."""
    e, width = unit.e, unit.width
    nearest_to = search(e, unit.encoding.bits, unit.width)
    unit.clear(unit.errors, unit.dim * unit.row)
    vector_tile = unit.vector_tile(8 // width)
    with e.loop(0, unit.pairs) as pair:
        rows = [unit.block.feedback + (pair * width + row) * (unit.dim * 4) for row in range(width)]
        earlier_values = (pair * width + 1) & -2  # rounded up to even: the coefficient after an odd number is 0
        corner = pair * unit.row_of_pairs
        with e.loop(0, unit.row, 64 * vector_tile) as offset:
            sources = [unit.errors + offset + 64 * number for number in range(vector_tile)]
            for row, by_source in enumerate(unit.products(rows, sources, earlier_values)):
                for number, total in enumerate(by_source):
                    place = offset + (row * unit.row + 64 * number)
                    e.store(e.load(unit.x + corner + place, _F16) + total, unit.target_of_pair + place)
        with unit.vectors() as offset:
            offsets = [offset + row * unit.row for row in range(width)]
            aims = [e.load(unit.target_of_pair + start, _F16) for start in offsets]
            norm, inverse = e.load(unit.norms + offset, _F16), e.load(unit.inverses + offset, _F16)
            nearest = nearest_to([aim * inverse for aim in aims])
            e.store(nearest.codes, unit.codes + pair * unit.row + offset)
            points = [point * norm for point in nearest.points]
            for start, aim, point in zip(offsets, aims, points, strict=True):
                e.store(e.load(unit.x + corner + start, _F16) - point, unit.errors + corner + start)
                if unit.encoding.is_fed_back:
                    e.store(aim - point, unit.metric_errors + corner + start)


def round_without_metric(unit: Unit) -> None:
    """Round as `Codec.encode` does; norms are limited to `EncodingSpec.largest`."""
    e = unit.e
    nearest_to = search(e, unit.encoding.bits, unit.width)
    with unit.vectors() as offset:
        norm = e.load(unit.norms + offset, _F16)
        if unit.encoding.largest < math.inf:
            norm = e.fmin(norm, unit.encoding.largest)
            e.store(norm, unit.norms + offset)
        divisor = e.select(norm > 0.0, norm, e.constant(_F16, 1.0))
        with e.loop(0, unit.pairs) as pair:
            source = unit.x + pair * unit.row_of_pairs + offset
            nearest = nearest_to([e.load(source, _F16, axis * unit.row) / divisor for axis in range(unit.width)])
            e.store(nearest.codes, unit.codes + pair * unit.row + offset)


def write_codes(unit: Unit, out: Value) -> None:
    """Transpose the codes in the rows of `codes` → (N, P) at `out`, uint8, or uint16 for ten bits."""
    e, size = unit.e, unit.encoding.code.width // 8
    with e.loop(0, unit.tokens) as token:
        source, target = unit.codes + token * 4, out + token * unit.pairs * size
        with e.loop(0, unit.pairs, 4) as pair:
            for number in range(4):
                code = e.load(source + (pair + number) * unit.row, I32)
                e.store(code.trunc(unit.encoding.code), target + pair * size, number * size)


def _weigh_x(unit: Unit) -> None:
    """The residues of `x`, times what they cost → `metric_x`; x·M·xᵀ, for tilted norms also x·xᵀ and x·μᵀ with the mean
    μ of queries → `sums_of_x`. See `metric.residue_costs`."""
    e = unit.e
    _add_products(unit, unit.x, unit.metric_x)
    ridge = _ridge(unit)
    with unit.vectors() as offset:
        sums = _Sums(e, "weighed", "plain", "mean")
        with e.loop(0, unit.dim, 2) as channel:
            place, mean = channel * unit.row + offset, unit.block.mean_query + channel * 4
            first, both, second = (e.broadcast(unit.block.costs + channel * 8, F32, LANES, at) for at in (0, 4, 8))
            a, b = (e.load(unit.metric_x + place, _F16, at) for at in (0, unit.row))
            weighed = e.fma(first, a, both * b), e.fma(both, a, second * b)
            for axis, residue in enumerate((a, b)):
                x = e.load(unit.x + place, _F16, axis * unit.row)
                e.store(weighed[axis], unit.metric_x + place, axis * unit.row)
                sums.add("weighed", residue, weighed[axis])
                if unit.encoding.tilted:
                    sums.add("plain", x, x)
                    sums.add("mean", x, e.broadcast(mean, F32, LANES, 4 * axis))
        for number, total in enumerate((sums["weighed"] - ridge * sums["plain"], sums["plain"], sums["mean"])):
            e.store(total, unit.sums_of_x + offset, number * unit.row)


def _fit_norms(unit: Unit) -> None:
    """Replace `norms` by norms of least cost, of keys for the queries that attend to each, and the costs with them →
    `costs`, given `errors` and, if rounding leaves them, their residues in `metric_errors`."""
    e = unit.e
    if not unit.encoding.is_fed_back:
        _add_products(unit, unit.errors, unit.metric_errors)
    ridge, vector_tile = _ridge(unit), unit.vector_tile(2)
    with e.loop(0, unit.row, 64 * vector_tile) as offset:
        by_vector = [_Sums(e, "xe", "ee", "plain_xe", "plain_ee", "mean_e") for _ in range(vector_tile)]
        with e.loop(0, unit.dim, 2) as channel:
            first, both, second = (e.broadcast(unit.block.costs + channel * 8, F32, LANES, at) for at in (0, 4, 8))
            for number, sums in enumerate(by_vector):
                place = channel * unit.row + offset + 64 * number
                a, b = (e.load(unit.metric_errors + place, _F16, at) for at in (0, unit.row))
                weighed = e.fma(first, a, both * b), e.fma(both, a, second * b)
                for axis, residue in enumerate((a, b)):
                    sums.add("xe", e.load(unit.metric_x + place, _F16, axis * unit.row), residue)
                    sums.add("ee", weighed[axis], residue)
        if unit.encoding.tilted:
            _add_plain_sums(unit, offset, by_vector)
        for number, sums in enumerate(by_vector):
            place = offset + 64 * number
            of_x = [e.load(unit.sums_of_x + place, _F16, at * unit.row) for at in range(3)]
            if unit.encoding.tilted:
                ratio, cost = _best_tilt(unit, of_x, sums, ridge)
            else:  # no other norm is tried
                xy = of_x[0] - sums["xe"]
                ratio, cost = _ratio(e, xy, xy - sums["xe"] + sums["ee"]), e.zero(_F16)
            e.store(cost, unit.costs + place)
            e.store(e.fmax(ratio * e.load(unit.norms + place, _F16), 0.0), unit.norms + place)


def _add_plain_sums(unit: Unit, offset: Value, by_vector: Sequence[_Sums]) -> None:
    """Add up x·eᵀ, e·eᵀ and e·μᵀ, in a loop of their own: AVX2 has no registers for all sums."""
    e = unit.e
    with e.loop(0, unit.dim) as channel:
        mean = e.broadcast(unit.block.mean_query + channel * 4, F32, LANES)
        for number, sums in enumerate(by_vector):
            place = channel * unit.row + offset + 64 * number
            x, error = e.load(unit.x + place, _F16), e.load(unit.errors + place, _F16)
            sums.add("plain_xe", x, error)
            sums.add("plain_ee", error, error)
            sums.add("mean_e", mean, error)


def _ridge(unit: Unit) -> Value:
    return unit.e.absolute(unit.e.broadcast(unit.block.costs, F32, LANES, 12))  # its sign says something else


def _best_tilt(unit: Unit, of_x: Values, sums: _Sums, ridge: Value) -> tuple[Value, Value]:
    """The factor of what is decoded that minimises the cost, and that cost; see `engine.quantization.encode`."""
    e, (xx, plain_xx, mean_x), mean_e = unit.e, of_x, sums["mean_e"]
    xe, ee = sums["xe"] - ridge * sums["plain_xe"], sums["ee"] - ridge * sums["plain_ee"]
    root = e.splat(e.sqrt(unit.dim.trunc(I32).to_float()), LANES)
    lean_x = (xx - mean_x * mean_x) / root + mean_x
    lean_e = (xe - mean_x * mean_e) / root + mean_e
    lean_y = lean_x - lean_e
    with_x, with_e = e.fma(lean_x, lean_y, xx - xe), e.fma(lean_e, lean_y, xe - ee)
    plain_xy = plain_xx - sums["plain_xe"]
    plain = _ratio(e, plain_xy, plain_xy - sums["plain_xe"] + sums["plain_ee"])
    low, high = TILT_RANGE
    ratio = e.fmin(e.fmax(_ratio(e, with_x, with_x - with_e), plain * low), plain * high)
    rest = -ratio + 1.0
    lean = rest * lean_x + ratio * lean_e
    return ratio, rest * (rest * xx + ratio * (xe + xe)) + ratio * ratio * ee + lean * lean


def _ratio(e: Emitter, numerator: Value, denominator: Value) -> Value:
    return e.select(denominator > 0.0, numerator / denominator, e.constant(_F16, 1.0))


def _add_products(unit: Unit, vectors: Value, out: Value) -> None:
    """Vectors (D, N) plus their products with each row of `matrix`, as far as its diagonal → `out` (D, N)."""
    e, vector_tile = unit.e, unit.vector_tile(4)
    with e.loop(0, unit.row, 64 * vector_tile) as offset, e.loop(0, unit.dim, 2) as channel:
        rows = [unit.block.matrix + (channel + row) * (unit.dim * 4) for row in (0, 1)]
        sources, place = [vectors + offset + 64 * number for number in range(vector_tile)], channel * unit.row + offset
        below_diagonal = e.broadcast(rows[1] + channel * 4, F32, LANES)
        for row, by_source in enumerate(unit.products(rows, sources, channel)):
            for number, total in enumerate(by_source):
                total = total + e.load(vectors + place, _F16, row * unit.row + 64 * number)
                if row:
                    total = e.fma(below_diagonal, e.load(vectors + place, _F16, 64 * number), total)
                e.store(total, out + place, row * unit.row + 64 * number)


class _Sums:
    """Sums of products of 16 vectors."""

    def __init__(self, e: Emitter, *names: str) -> None:
        self._e, self._sums = e, {name: e.variable(e.zero(_F16)) for name in names}

    def add(self, name: str, a: Value, b: Value) -> None:
        self._sums[name].set(self._e.fma(a, b, self._sums[name].get()))

    def __getitem__(self, name: str) -> Value:
        return self._sums[name].get()
