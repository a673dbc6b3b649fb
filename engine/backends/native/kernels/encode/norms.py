"""The norms of a block that minimise its error metric."""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.backends.native.kernels.encode.unit import LANES, Unit
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I32, Value, Variable, vector
from polarlm.engine.quantization.encode import TILT_RANGE

_F16 = vector(F32, LANES)


def write_norms(unit: Unit) -> None:
    """Replace `norms` by norms of least cost, given the targets in `x` and their errors in `errors`, overwritten.

    Where several norms are tried, the costs with them → `costs`.
    """
    e, tilted = unit.e, unit.encoding.tilted
    vector_tile = unit.vector_tile(2)
    with e.loop(0, unit.row, 64 * vector_tile) as offset:
        sources = [array + offset + 64 * number for array in (unit.x, unit.errors) for number in range(vector_tile)]
        if not tilted:
            _decode(unit, sources)
        by_vector = [_Sums(e, tilted) for _ in range(vector_tile)]
        with e.loop(0, unit.dim, 2) as channel:
            rows = [unit.block.matrix + (channel + row) * (unit.dim * 4) for row in (0, 1)]
            sums = unit.products(rows, sources, channel)
            here = [e.load(row + channel * 4, vector(F32, 2)) for row in rows]
            diagonal = [e.splat(e.extract(row, place), LANES) for place, row in enumerate(here)]
            between = e.splat(e.extract(here[1], 0), LANES)
            means = (
                [e.broadcast(unit.block.mean_query + channel * 4, F32, LANES, 4 * row) for row in (0, 1)]
                if tilted
                else []
            )
            for number, own in enumerate(by_vector):
                xs, ys = (
                    [e.load(sources[place] + channel * unit.row, _F16, row * unit.row) for row in (0, 1)]
                    for place in (number, number + vector_tile)
                )
                own_x, own_y = ([by_source[place] for by_source in sums] for place in (number, number + vector_tile))
                own_x[1] = e.fma(between, xs[0], own_x[1])
                own_y[1] = e.fma(between, ys[0], own_y[1])
                for row in (0, 1):
                    own.add(diagonal[row], xs[row], ys[row], own_x[row], own_y[row])
                    if tilted:
                        own.add_mean(means[row], xs[row], ys[row])
        for number, own in enumerate(by_vector):
            place = offset + 64 * number
            ratio, cost = own.tilted(unit.dim) if tilted else (own.fitted(), None)
            if unit.encoding.tries_norms:
                assert cost is not None
                e.store(cost, unit.costs + place)
            norm = ratio * e.load(unit.norms + place, _F16)
            e.store(e.fmax(norm, 0.0), unit.norms + place)


def _decode(unit: Unit, sources: Sequence[Value]) -> None:
    """Replace errors, at the second half of `sources`, by x − errors, where x is at the first half."""
    e, half = unit.e, len(sources) // 2
    with e.loop(0, unit.dim) as channel:
        for x, errors in zip(sources[:half], sources[half:], strict=True):
            at = errors + channel * unit.row
            e.store(e.load(x + channel * unit.row, _F16) - e.load(at, _F16), at)


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

    def fitted(self) -> Value:
        """The factor of y that minimises the cost of the error."""
        return self._ratio(self.sums["xy"].get(), self.sums["yy"].get())

    def tilted(self, dim: Value) -> tuple[Value, Value]:
        """The factor of what is decoded that minimises the cost for the queries that attend to each key, and that cost;
        see `engine.quantization.encode`."""
        e = self.e
        got = {name: total.get() for name, total in self.sums.items()}
        xx, xe, ee, mean_x, mean_e = (got[name] for name in ("xx", "xy", "yy", "mean_x", "mean_y"))
        root = e.splat(e.sqrt(dim.trunc(I32).to_float()), LANES)
        lean_x = (xx - mean_x * mean_x) / root + mean_x
        lean_e = (xe - mean_x * mean_e) / root + mean_e
        lean_y = lean_x - lean_e
        with_x, with_e = e.fma(lean_x, lean_y, xx - xe), e.fma(lean_e, lean_y, xe - ee)
        plain = self._ratio(got["plain_x"], got["plain"])
        low, high = TILT_RANGE
        ratio = e.fmin(e.fmax(self._ratio(with_x, with_x - with_e), plain * low), plain * high)
        rest = -ratio + 1.0
        lean = rest * lean_x + ratio * lean_e
        return ratio, rest * (rest * xx + ratio * (xe + xe)) + ratio * ratio * ee + lean * lean

    def _ratio(self, numerator: Value, denominator: Value) -> Value:
        """numerator / denominator, or 1 where the denominator is 0."""
        e = self.e
        return e.select(denominator > 0.0, numerator / denominator, e.constant(_F16, 1.0))
