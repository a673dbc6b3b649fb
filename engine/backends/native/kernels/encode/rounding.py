"""Rounding of a block to codes, with error feedback between pairs, with one norm or the best of several, or without
feedback; and the norms that minimise its error metric."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from polarlm.engine.backends.native.kernels.encode.nearest import search
from polarlm.engine.backends.native.kernels.encode.unit import LANES, ROW_PAD, Unit, add_chains
from polarlm.engine.jit.lang import F32, I32, Emitter, Value, Variable, vector
from polarlm.engine.quantization.encode import TILT_RANGE

_F16, _I16 = vector(F32, LANES), vector(I32, LANES)


def round_with_best_norms(unit: Unit, round_: Callable[[Unit], None]) -> None:
    """Round with each of `norm_factors` times the RMS; the codes and norms of least cost → `codes` and `norms`."""
    e = unit.e
    factors = e.constant_bytes(np.array(unit.encoding.norm_factors, "<f4").tobytes())
    with unit.vectors() as offset:
        e.store(e.load(unit.norms + offset, _F16), unit.rms + offset)
        e.store(e.constant(_F16, float(np.finfo(np.float32).max)), unit.least + offset)
    multiply_by_metric(unit, unit.x, unit.metric_x)
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
                start = pair * unit.row + offset
                codes, best = e.load(unit.codes + start, _I16), unit.best_codes + start
                e.store(e.select(is_better, codes, e.load(best, _I16)), best)
    unit.codes, unit.norms = unit.best_codes, unit.best_norms


def round_all_tokens(unit: Unit) -> None:
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
            for start, point in zip(offsets, points, strict=True):
                e.store(e.load(unit.x + corner + start, _F16) - point, unit.errors + corner + start)


def round_without_feedback(unit: Unit) -> None:
    """Round without feedback, as `Codec.encode` does; norms are limited to `Encoding.largest`."""
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


def round_skewed(unit: Unit) -> None:
    """Round with feedback along tokens → `codes`; targets (x plus that feedback) → `x`, and their errors → `errors`.

    Rows are skewed: row d has pair j of token d − j in lane j. All cells of a row are rounded at once. They
    need errors of earlier rows: the error of pair j − k of the same token is in row d − k, lane j − k; the
    error of pair j of token t − m is in row d − m, lane j.
    """
    e, width, row_bytes = unit.e, unit.width, unit.row_of_lanes * unit.width
    nearest_to = search(e, unit.encoding.bits, unit.width)
    pad = row_bytes + unit.row_of_lanes  # zeros that are read for rows and lanes before the first
    nbytes = row_bytes * unit.encoding.rows(unit.pairs) + pad
    targets, errors, target_errors = (unit.allocate(nbytes) + pad for _ in range(3))
    unit.clear(targets + -pad, nbytes * 3)
    _skew(unit, unit.x, targets)
    norms, inverses = _reverse(unit, unit.norms), _reverse(unit, unit.inverses)
    axes = [unit.row_of_lanes * axis for axis in range(width)]
    with e.loop(0, unit.encoding.rows(unit.pairs)) as row:
        first = e.imax(row - (unit.tokens - 1), 0) // LANES * LANES
        with e.loop(first, e.imin(row + 1, unit.pairs), LANES) as pair:
            token = row - pair  # the first lane's token; each next lane has the one before it
            start = row_bytes * row + pair * 4
            places = [start + axis for axis in axes]
            xs = [e.load(targets + place, _F16) for place in places]
            from_tokens = _from_tokens(unit, errors + start, token)
            own_targets = [x + total for x, total in zip(xs, from_tokens, strict=True)]
            from_pairs = _from_pairs(unit, target_errors + start, row, pair)
            token_at = (-token + (ROW_PAD + unit.tokens - 1)) * 4
            inverse, norm = e.load(inverses + token_at, _F16), e.load(norms + token_at, _F16)
            nearest = nearest_to([(x + total) * inverse for x, total in zip(own_targets, from_pairs, strict=True)])
            e.store(nearest.codes, unit.codes + unit.row_of_lanes * row + pair * 4)
            lane = e.splat(token.trunc(I32), LANES) - e.constant(_I16, tuple(range(LANES)))
            exists = (lane >= 0) & (lane < unit.tokens)
            for place, x, target, point in zip(places, xs, own_targets, nearest.points, strict=True):
                for array, error in ((errors, x - point * norm), (target_errors, target - point * norm)):
                    e.store(e.select(exists, error, e.zero(_F16)), array + place)
                e.store(target, targets + place)
    _skew(unit, targets, unit.x, back=True)
    _skew(unit, target_errors, unit.errors, back=True)


def _reverse(unit: Unit, numbers: Value) -> Value:
    """Numbers (N,) float32 of tokens → the address of ROW_PAD zeros, the numbers in reverse order, ROW_PAD zeros."""
    e, out = unit.e, unit.allocate(unit.row + 8 * ROW_PAD)
    unit.clear(out, e.i64(unit.row + 8 * ROW_PAD))
    with unit.vectors() as offset:
        value = e.load(numbers + offset, _F16)
        e.store(e.shuffle(value, value, range(LANES - 1, -1, -1)), out + unit.row + -offset)
    return out


def _from_tokens(unit: Unit, errors: Value, token: Value) -> list[Value]:
    """Error feedback from earlier tokens to 16 cells. errors: address of these cells; token: the first cell's."""
    e, width, diagonal = unit.e, unit.width, 4 * unit.tokens + 8 * ROW_PAD
    sums = [[e.variable(e.zero(_F16)) for _ in range(2)] for _ in range(width)]
    coefficients = unit.block.token_feedback + (-token + (ROW_PAD + unit.tokens - 1)) * 4
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
                for target_axis, chains in enumerate(sums):
                    factor = e.load(factors + diagonal * (target_axis * width + axis), _F16)
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
                e.store(e.load(source + (skewed if back else plain), F32), target + (plain if back else skewed))
                plain, skewed = plain + 4, skewed + step


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


def write_norms(unit: Unit) -> None:
    """Replace `norms` by norms of least cost, given the targets in `x` and their errors in `errors`, overwritten.

    Where several norms are tried, the costs with them → `costs`.
    """
    e, tilted = unit.e, unit.encoding.tilted
    if not tilted:
        _decode(unit)
    if not unit.encoding.tries_norms:
        multiply_by_metric(unit, unit.x, unit.metric_x)
    multiply_by_metric(unit, unit.errors, unit.metric_errors)
    vector_tile = unit.vector_tile(2)
    with e.loop(0, unit.row, 64 * vector_tile) as offset:
        by_vector = [_Sums(e, tilted) for _ in range(vector_tile)]
        with e.loop(0, unit.dim) as channel:
            diagonal = e.broadcast(unit.block.matrix + channel * (unit.dim * 4 + 4), F32, LANES)
            mean = e.broadcast(unit.block.mean_query + channel * 4, F32, LANES) if tilted else None
            place = channel * unit.row + offset
            for number, cost_sums in enumerate(by_vector):
                arrays = unit.x, unit.errors, unit.metric_x, unit.metric_errors
                x, y, sum_x, sum_y = (e.load(array + place, _F16, 64 * number) for array in arrays)
                cost_sums.add(diagonal, x, y, sum_x, sum_y)
                if mean is not None:
                    cost_sums.add_mean(mean, x, y)
        for number, cost_sums in enumerate(by_vector):
            place = offset + 64 * number
            ratio, cost = cost_sums.best_tilt(unit.dim) if tilted else (cost_sums.fitted_ratio(), None)
            if unit.encoding.tries_norms:
                assert cost is not None
                e.store(cost, unit.costs + place)
            e.store(e.fmax(ratio * e.load(unit.norms + place, _F16), 0.0), unit.norms + place)


def multiply_by_metric(unit: Unit, vectors: Value, out: Value) -> None:
    """The products of vectors (D, N) with each row of the metric's matrix, as far as its diagonal → `out` (D, N)."""
    e, vector_tile = unit.e, unit.vector_tile(4)
    with e.loop(0, unit.row, 64 * vector_tile) as offset, e.loop(0, unit.dim, 2) as channel:
        rows = [unit.block.matrix + (channel + row) * (unit.dim * 4) for row in (0, 1)]
        sources, place = [vectors + offset + 64 * number for number in range(vector_tile)], channel * unit.row + offset
        below_diagonal = e.broadcast(rows[1] + channel * 4, F32, LANES)
        for row, by_source in enumerate(unit.products(rows, sources, channel)):
            for number, total in enumerate(by_source):
                if row:
                    total = e.fma(below_diagonal, e.load(vectors + place, _F16, 64 * number), total)
                e.store(total, out + place, row * unit.row + 64 * number)


def _decode(unit: Unit) -> None:
    """Replace errors by x − errors."""
    e = unit.e
    with e.loop(0, unit.dim * unit.row, 64) as offset:
        e.store(e.load(unit.x + offset, _F16) - e.load(unit.errors + offset, _F16), unit.errors + offset)


class _Sums:
    """Sums over channels for 16 vectors x and y: x·S·xᵀ, x·S·yᵀ, y·S·yᵀ with a symmetric matrix S, and others.

    If norms are tilted, y is the error of x, for a precise cost; else it is what is decoded.
    """

    def __init__(self, e: Emitter, tilted: bool) -> None:
        self.e, self.is_tilted = e, tilted
        names = ["xy", "yy", *(["xx", "mean_x", "mean_y", "plain_x", "plain"] if tilted else [])]
        self.sums: dict[str, Variable] = {name: e.variable(e.zero(_F16)) for name in names}

    def _add(self, name: str, a: Value, b: Value) -> None:
        self.sums[name].set(self.e.fma(a, b, self.sums[name].get()))

    def add(self, diagonal: Value, x: Value, y: Value, sum_x: Value, sum_y: Value) -> None:
        """Add a channel. sum_x, sum_y: the products of all earlier channels with its row of S."""
        e = self.e
        own_y = e.fma(diagonal, y, sum_y)
        self._add("xy", x, own_y)
        self._add("xy", y, sum_x)
        self._add("yy", y, own_y + sum_y)
        if self.is_tilted:
            self._add("xx", x, e.fma(diagonal, x, sum_x + sum_x))

    def add_mean(self, mean: Value, x: Value, y: Value) -> None:
        decoded = x - y
        for name, a, b in (("mean_x", mean, x), ("mean_y", mean, y)):
            self._add(name, a, b)
        for name, a in (("plain_x", x), ("plain", decoded)):
            self._add(name, a, decoded)

    def fitted_ratio(self) -> Value:
        """The factor of y that minimises the cost of the error."""
        return self._ratio(self.sums["xy"].get(), self.sums["yy"].get())

    def best_tilt(self, dim: Value) -> tuple[Value, Value]:
        """The factor of what is decoded that minimises the cost for the queries that attend to each key, and that cost;
        see `engine.quantization.encode`."""
        e = self.e
        totals = {name: total.get() for name, total in self.sums.items()}
        xx, xe, ee, mean_x, mean_e = (totals[name] for name in ("xx", "xy", "yy", "mean_x", "mean_y"))
        root = e.splat(e.sqrt(dim.trunc(I32).to_float()), LANES)
        lean_x = (xx - mean_x * mean_x) / root + mean_x
        lean_e = (xe - mean_x * mean_e) / root + mean_e
        lean_y = lean_x - lean_e
        with_x, with_e = e.fma(lean_x, lean_y, xx - xe), e.fma(lean_e, lean_y, xe - ee)
        plain = self._ratio(totals["plain_x"], totals["plain"])
        low, high = TILT_RANGE
        ratio = e.fmin(e.fmax(self._ratio(with_x, with_x - with_e), plain * low), plain * high)
        rest = -ratio + 1.0
        lean = rest * lean_x + ratio * lean_e
        return ratio, rest * (rest * xx + ratio * (xe + xe)) + ratio * ratio * ee + lean * lean

    def _ratio(self, numerator: Value, denominator: Value) -> Value:
        e = self.e
        return e.select(denominator > 0.0, numerator / denominator, e.constant(_F16, 1.0))
