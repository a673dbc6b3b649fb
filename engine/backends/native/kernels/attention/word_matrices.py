"""Attention of prompts by exact products of int16, two at a time (`Level.dot2`).

Each query, key and value has a scale: that of a value is a power of two, 2^n. A tile of KEYS tokens has

    keys    (KEYS / 16, D / 2, 16, 2) int16, of channels rounded up to a multiple of 32; then for each token, float32,
            the scale of its key, n, and 2^-n
    values  (D / 16, KEYS / 2, 16, 2) int16

where a pair is channels or tokens i and i + 16 of 32. The products of a query and a key, and the sum of a tile's
weights and values, fit an int32. A weight is multiplied by the scale of its value, which is added to the score. The
weights of a query and a tile are divided by a unit: none is above _MOST_WEIGHT then, nor their sum above _MOST_SUM.
Sums of weights are of those before rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from polarlm.engine.backends.native.kernels.attention.matrices import KEYS, STEP, MatrixFormat
from polarlm.engine.backends.native.kernels.attention.matrix_unit import (
    MAGIC,
    PAIR,
    ROWS,
    MatrixSegment,
    MatrixUnit,
    power_of_fraction,
)
from polarlm.engine.backends.native.kernels.attention.partials import LOWEST
from polarlm.engine.jit.lang import F32, I32, Emitter, Value, largest, vector

_F16, _PAIRS = vector(F32, 16), vector(I32, 16)
_GROUP = 64  # bytes of the scores of a query and 16 keys
_MOST_NORM, _MOST_WORD = 46320, 2**15 - 1  # also rounded, up to 1,024 channels' norm squared is below 2³¹
_LEAST = 1e-30  # vectors below it are zeros
_MOST_VALUE, _MOST_SUM = 2**14 - 1, 2**17 - 64  # of a query's weights and a tile: also rounded, sums fit an int32
_MOST_WEIGHT = 2**15 - 8  # 2^0 is up to 1 + 7.5e-5 here
_LEAST_SCALE = -40  # exponent of values' scales: smaller values are rounded as if they were larger
_LOWEST_POWER = -100.0  # scores less than the largest one by more count as less by this


class WordMatrices(MatrixFormat):
    name = "words"

    def key_bytes(self, dim: int) -> int:
        return _codes(dim) + 3 * 4 * KEYS

    def value_bytes(self, dim: int) -> int:
        return 2 * dim * KEYS

    def write_tile(self, e: Emitter, dim: int, sides: tuple[Value, Value], targets: tuple[Value, Value]) -> None:
        inverse = e.stack(4 * KEYS)
        numbers = targets[0] + _codes(dim)
        _write_scales(e, dim, sides, numbers, inverse)
        _write_keys(e, dim, sides[0], inverse, targets[0])
        _write_values(e, dim, sides[1], numbers + 2 * 4 * KEYS, targets[1])


WORDS = WordMatrices()


def _codes(dim: int) -> int:
    """Bytes of the keys of a tile without their scales."""
    return KEYS * _query_bytes(dim)


def _query_bytes(dim: int) -> int:
    return -(-dim // STEP) * STEP * 2


def _vectors(e: Emitter, row: Value, dim: int) -> list[Value]:
    return [e.load(row, _F16, 4 * first) for first in range(0, dim, 16)]


def _pair(low: Value, high: Value) -> Value:
    """Pairs of int16 of two vectors of int32."""
    return (low & 0xFFFF) | (high << 16)


def _scale(e: Emitter, vectors: Sequence[Value], top: Value) -> tuple[Value, Value]:
    """What a query or a key, whose largest magnitude is top, is divided by to become integers, and the inverse.

    Its norm is then at most _MOST_NORM: a sum of products is at most the product of both norms (Cauchy and Schwarz). In
    a vector with one large channel the others have 15 bits so, in others the largest one has 13 or more.
    """
    squares = e.zero(_F16)
    for vector_ in vectors:
        squares = e.fma(vector_, vector_, squares)
    scale = e.fmax(e.sqrt(e.sum_lanes(squares)) * (1 / _MOST_NORM), top * (1 / _MOST_WORD))
    inverse = e.select(scale > _LEAST, e.const_like(1.0, scale) / scale, e.zero(F32))
    return e.fma(top, e.const_like(0.0, top), scale), inverse  # NaN where a channel is not finite


def _write_scales(e: Emitter, dim: int, sides: tuple[Value, Value], numbers: Value, inverse: Value) -> None:
    with e.loop(0, KEYS) as token:
        k, v = (_vectors(e, side + token * (4 * dim), dim) for side in sides)
        scale, own_inverse = _scale(e, k, largest(e, k))
        value, target = largest(e, v), numbers + token * 4
        e.store(scale, target)
        e.store(own_inverse, inverse + token * 4)
        # The power of two that is not below value / _MOST_VALUE.
        bits = (value * (1 / _MOST_VALUE)).bits(I32) + 0x7FFFFF
        exponent = e.imax(bits.ashr(23) - 127, _LEAST_SCALE)
        e.store(e.fma(value, e.const_like(0.0, value), exponent.to_float()), target, 4 * KEYS)
        e.store(((-exponent + 127) << 23).bits(F32), target, 8 * KEYS)


def _write_keys(e: Emitter, dim: int, k: Value, inverse: Value, keys: Value) -> None:
    with e.loop(0, KEYS, 16) as first:
        for channel in range(0, dim, STEP):
            pairs = []
            for i in range(16):
                row, factor = k + (first + i) * (4 * dim), e.broadcast(inverse + first * 4, F32, 16, 4 * i)
                pairs.append(_rounded_pair(e, row, channel, dim, factor))
            target = keys + first * _query_bytes(dim)
            for i, tokens in enumerate(e.transpose(pairs)):
                e.store(tokens, target, 64 * (channel // 2 + i))


def _rounded_pair(e: Emitter, row: Value, channel: int, dim: int, factor: Value) -> Value:
    """32 channels of a row, times factor, as pairs; those beyond D are 0."""
    low, high = (
        e.round(e.load(row, _F16, 4 * at) * factor) if at < dim else e.zero(_PAIRS) for at in (channel, channel + 16)
    )
    return _pair(low, high)


def _write_values(e: Emitter, dim: int, v: Value, inverse: Value, values: Value) -> None:
    for step in range(0, KEYS, STEP):
        with e.loop(0, STEP // 2) as i:
            factors = [e.broadcast(inverse + i * 4, F32, 16, 4 * token) for token in (step, step + 16)]
            for channel in range(0, dim, 16):
                places = (4 * (dim * token + channel) for token in (step, step + 16))
                low, high = (
                    e.round(e.load(v + i * (4 * dim), _F16, place) * factor)
                    for place, factor in zip(places, factors, strict=True)
                )
                e.store(_pair(low, high), values + i * 64, 2 * KEYS * channel + 32 * step)


class WordUnit(MatrixUnit):
    format = WORDS

    @staticmethod
    def query_bytes(dim: int) -> int:
        return ROWS * _query_bytes(dim) + 64  # then their scales

    @contextmanager
    def registers(self) -> Iterator[None]:
        e = self._e
        self._tile = (8, 2) if e.level.has_room else (4, 1)  # rows and vectors whose sums stay in registers
        self._rescale, self._row_sums = e.stack(4 * ROWS), e.stack(64 * ROWS)
        yield

    def write_query(self, queries: Value, row: Value, q: Value, factor: Value) -> None:
        e, dim = self._e, self._dim
        channels = [part * factor for part in _vectors(e, q, dim)]
        scale, inverse = _scale(e, channels, largest(e, channels))
        inverse = inverse * factor
        target = queries + row * _query_bytes(dim)
        for channel in range(0, dim, STEP):
            e.store(_rounded_pair(e, q, channel, dim, e.splat(inverse, 16)), target, 2 * channel)
        e.store(scale, queries + row * 4, ROWS * _query_bytes(dim))

    def attend(
        self, first: Value, sides: tuple[Value, Value], segment: MatrixSegment, from_tile: Value, to_tile: Value
    ) -> None:
        e, (keys, values), dim = self._e, sides, self._dim
        with e.loop(from_tile, to_tile) as tile, e.loop(first, first + PAIR, ROWS) as i:
            own_keys = keys + tile * self.format.key_bytes(dim)
            numbers = own_keys + _codes(dim)
            self._score(self._queries_of(i), own_keys)
            self._mask(self._scores, i, segment.start + tile * KEYS, segment.tokens - tile * KEYS)
            self._weigh(i, self._find_tops(self._scores, i), numbers + 2 * 4 * KEYS)
            self._add_values(self._sum(i), values + tile * self.format.value_bytes(dim))

    def _score(self, queries: Value, keys: Value) -> None:
        """Scores of 16 queries with the keys of a tile, capped, plus the exponents of the scales of values."""
        e, size, numbers = self._e, _query_bytes(self._dim), keys + _codes(self._dim)
        rows, vectors = self._tile
        with e.loop(0, KEYS, 16 * vectors) as key, e.loop(0, ROWS, rows) as row:
            sums = self._multiply(queries + row * size, size, (keys + key * size, 16 * size), size // 4, vectors)
            for i, totals in enumerate(sums):
                scale = e.broadcast(queries + row * 4, F32, 16, ROWS * size + 4 * i)
                for number, total in enumerate(totals):
                    own = numbers + key * 4
                    score = total.to_float() * e.load(own, _F16, _GROUP * number)
                    exponent = e.load(own, _F16, 4 * KEYS + _GROUP * number)
                    score = (
                        self._cap(score * scale) + exponent if self._spec.is_capped else e.fma(score, scale, exponent)
                    )
                    e.store(score, self._scores + key * 64 + row * 64, 1024 * number + 64 * i)

    def _weigh(self, i: Value, highest: Value, inverses: Value) -> None:
        """Scores → weights (16, KEYS) int16; adds them, times the inverses of the scales of values, to their sums."""
        e = self._e
        is_seen = highest > LOWEST
        tops = e.load(self._factors, _F16)
        e.store(e.select(is_seen, highest, e.zero(_F16)), self._factors)
        e.store(e.select(is_seen, e.exp2(highest - tops), e.zero(_F16)), self._rescale)
        with e.loop(0, ROWS) as row:
            top, total, scaled = e.broadcast(self._factors + row * 4, F32, 16), e.zero(_F16), e.zero(_F16)
            for token in range(0, KEYS, 16):
                weight = _power(e, e.load(self._scores + row * 64, _F16, 64 * token) - top)
                total, scaled = e.fma(weight, e.load(inverses, _F16, 4 * token), total), scaled + weight
                e.store(weight, self._scores + row * 64, 64 * token)
            e.store(scaled, self._row_sums + row * 64)
            sums, factor = self._sum(i) + row * 64, e.broadcast(self._rescale + row * 4, F32, 16)
            e.store(e.fma(total, factor, e.load(sums, _F16, 1024 * self._parts)), sums, 1024 * self._parts)
        of_rows = e.combine_rows([e.load(self._row_sums, _F16, 64 * row) for row in range(ROWS)], operator.add)
        unit = e.fmax(of_rows * (1 / _MOST_SUM), e.constant(_F16, 1 / _MOST_WEIGHT))
        e.store(e.constant(_F16, 1.0) / unit, self._factors)
        e.store(e.load(self._rescale, _F16) * unit, self._rescale)
        with e.loop(0, ROWS) as row:
            inverse, magic = e.broadcast(self._factors + row * 4, F32, 16), e.constant(_F16, MAGIC)
            for step in range(0, KEYS, STEP):
                low, high = (
                    e.fma(e.load(self._scores + row * 64, _F16, 64 * token), inverse, magic).bits(_PAIRS)
                    for token in (step, step + 16)
                )
                e.store(_pair(low, high), self._weights + row * (2 * KEYS), 2 * step)

    def _add_values(self, sums: Value, values: Value) -> None:
        """Add weights · values of a tile to sums."""
        e, (rows, vectors), nbytes = self._e, self._tile, 2 * KEYS * 16
        whole = self._parts // vectors * vectors

        def add(part: Value, row: Value, vectors: int) -> None:
            right = values + part * nbytes, nbytes
            for i, totals in enumerate(
                self._multiply(self._weights + row * (2 * KEYS), 2 * KEYS, right, KEYS // 2, vectors)
            ):
                factor = e.broadcast(self._rescale + row * 4, F32, 16, 4 * i)
                for number, total in enumerate(totals):
                    place, target = 1024 * number + 64 * i, sums + part * 1024 + row * 64
                    e.store(e.fma(total.to_float(), factor, e.load(target, _F16, place)), target, place)

        for begin, end, count in ((0, whole, vectors), (whole, self._parts, 1)):
            if begin < end:
                with e.loop(begin, end, count) as part, e.loop(0, ROWS, rows) as row:
                    add(part, row, count)

    def _multiply(
        self, left: Value, stride: int, right: tuple[Value, int], pairs: int, vectors: int
    ) -> list[list[Value]]:
        """Sums of products of rows (pairs, 2) with `vectors` times 16 columns (pairs, 16, 2). stride: bytes from row to
        row; right: the address of the first columns, and bytes to the next ones."""
        e, (columns, next_columns) = self._e, right
        sums = [[e.variable(e.zero(_PAIRS)) for _ in range(vectors)] for _ in range(self._tile[0])]
        with e.loop(0, pairs, 2) as first:
            for pair in range(2):
                own = [e.load(columns + first * 64, _PAIRS, 64 * pair + next_columns * n) for n in range(vectors)]
                for i, row in enumerate(sums):
                    both = e.broadcast(left + first * 4, I32, 16, stride * i + 4 * pair)
                    for total, column in zip(row, own, strict=True):
                        total.set(e.order_sum(e.level.dot2(e, total.get(), both, column)))
        return [[total.get() for total in row] for row in sums]


def _power(e: Emitter, x: Value) -> Value:
    """2^x of float32 up to 0; NaN for NaN. The relative error is up to 7.5e-5."""
    power, shifted = power_of_fraction(e, e.select(x < _LOWEST_POWER, e.const_like(_LOWEST_POWER, x), x))
    return (power.bits(_PAIRS) + (shifted.bits(_PAIRS) << 23)).bits(_F16)
