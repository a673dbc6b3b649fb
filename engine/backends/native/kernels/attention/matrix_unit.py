"""The work of a unit of attention on its queries by products of numbers of 16 bits (`matrices`), with online softmax.

Scores and sums are float32, in scratch. The logarithms of weights are to the base 2: queries are multiplied by log₂ e.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import reduce
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.attention.matrices import KEYS, MATRIX, MatrixFormat
from polarlm.engine.backends.native.kernels.attention.partials import LOWEST
from polarlm.engine.backends.native.kernels.attention.prompts import PromptArguments
from polarlm.engine.backends.native.kernels.attention.unit import LOG2_E, PromptSpec, larger
from polarlm.engine.backends.native.kernels.multiply import offsets, rotate
from polarlm.engine.backends.native.kernels.rows import apply_softcap
from polarlm.engine.jit.lang import F32, I32, I64, Emitter, Value, vector
from polarlm.engine.jit.lang.records import Int64, Pointer
from polarlm.engine.jit.run.workers import SCRATCH

ROWS = 16  # queries of a left matrix
PAIR = 2 * ROWS  # queries that attend together
_SIZES = 384, 192  # most queries of a unit: as many as scratch has room for read keys and values less often
_RISE = 8.0  # sums are rescaled when a score exceeds what its row's scores are reduced by, by more: weights reach 2⁸
MAGIC = 12582912.0  # 1.5 · 2²³: the unit of its last bit is 1, and its low 16 bits are 0
# Coefficients of 2^f, lowest power first, for |f| ≤ ½, whose largest relative error, 7.5e-5, is least: bfloat16 rounds
# by up to 2⁻⁸, and integers up to 8,192 by 6e-5 of that.
_POWER = 0.999928057, 0.693260968, 0.242611125, 0.0551716685
_F16 = vector(F32, 16)


class MatrixSegment(NamedTuple):
    """Consecutive keys and values as `matrices`: of at least one token, the first of which has position `start`.

    key_stride, value_stride: bytes from head to head.
    """

    keys: Pointer
    values: Pointer
    key_stride: Int64
    value_stride: Int64
    start: Int64
    tokens: Int64


class MatrixUnit:
    """Emits the work of a unit on its queries. Their state is in scratch."""

    format: MatrixFormat

    @staticmethod
    def query_bytes(dim: int) -> int:
        """Bytes of 16 queries."""
        raise NotImplementedError

    @classmethod
    def arrays(cls, dim: int, queries: int) -> list[int]:
        """Offsets of the arrays of a unit of so many queries in scratch, and their end. They are float32 if not said
        otherwise.

        For each of two times 16 queries: scores (KEYS / 16, 16, 16) with a tile; their weights, 16 · KEYS numbers of 16
        bits. factors (16,): what a row's scores are reduced by, or its sums multiplied by. positions, int64, of all
        queries. result (D,). For each 16 queries: their matrices, times the scale and log₂ e; sums (D / 16 + 1, 16,
        16), of weighted values, and in the columns of the last matrix of weights. spare: sums of 16 queries that nobody
        reads. tops: for each query what its scores are reduced by.
        """
        scores, weights, sums = PAIR * KEYS, PAIR * KEYS // 2, (dim // 16 + 1) * ROWS
        places = 2 * queries, dim, queries * cls.query_bytes(dim) // 64, queries * sums, ROWS * sums, queries
        return offsets(scores, weights, ROWS, *places)

    @classmethod
    def most_queries(cls, dim: int) -> int:
        """The most queries of a unit with heads of `dim` channels; 0 if there is no kernel for them."""
        return next((size for size in _SIZES if dim % 16 == 0 and cls.arrays(dim, size)[-1] <= SCRATCH), 0)

    def __init__(self, e: Emitter, spec: PromptSpec, scratch: Value, args: PromptArguments) -> None:
        self._e, self._spec, self._dim, self._args = e, spec, spec.dim, args
        places = [scratch + place for place in self.arrays(spec.dim, self.most_queries(spec.dim))[:-1]]
        self._scores, self._weights, self._factors, self._positions, self._result, *of_queries = places
        self._queries, self._sums, self._spare, self._tops = of_queries
        self._parts = spec.dim // 16  # matrices of weighted values, before the one of weights

    def registers(self) -> AbstractContextManager[None]:
        """What the context emits may use what the level's products need."""
        raise NotImplementedError

    def write_query(self, queries: Value, row: Value, q: Value, factor: Value) -> None:
        """q (D,), times factor, → row of 16 queries."""
        raise NotImplementedError

    def attend(
        self, first: Value, sides: tuple[Value, Value], segment: MatrixSegment, from_tile: Value, to_tile: Value
    ) -> None:
        """Attend with two times 16 queries from `first` on to consecutive tiles of the keys and values of a head."""
        raise NotImplementedError

    def _queries_of(self, i: Value) -> Value:
        """The 16 queries that i is one of."""
        return self._queries + i // ROWS * self.query_bytes(self._dim)

    def _sum(self, i: Value) -> Value:
        """Row i of the first matrix of sums."""
        return self._sums + i // ROWS * ((self._parts + 1) * MATRIX) + i % ROWS * 64

    def positions(self, first: Value) -> tuple[Value, Value]:
        """Of the first and the last of a pair of 16 queries."""
        address = self._positions + first * 8
        return self._e.load(address, I64), self._e.load(address, I64, 8 * (PAIR - 1))

    def open(self, i: Value, position: Value, q: Value, scale: Value, sink: Value | None = None) -> None:
        """Initialize query i from q (D,), times scale, with empty sums, or with the score at `sink`."""
        e, sums = self._e, self._sum(i)
        self.write_query(self._queries_of(i), i % ROWS, q, scale * LOG2_E)
        for number in range(self._parts + 1):
            e.store(e.zero(_F16), sums, MATRIX * number)
        if sink is not None:
            e.store(e.constant(F32, 1.0), sums, MATRIX * self._parts)
        e.store(e.constant(F32, LOWEST) if sink is None else e.load(sink, F32) * LOG2_E, self._tops + i * 4)
        e.store(position, self._positions + i * 8)

    def pad_queries(self, queries: Value, position: Value) -> None:
        """Initialize padding queries up to a multiple of 32; their results are not read."""
        e = self._e
        with e.loop(queries, (queries + (PAIR - 1)) // PAIR * PAIR) as i:
            self.open(i, position, self._result, e.constant(F32, 0.0))

    def resume(self, i: Value, out: Value, row_max: Value, row_sum: Value, number: Value) -> None:
        """Load the state of query i that an earlier launch has stored."""
        e, sums = self._e, self._sum(i)
        for part in range(self._parts):
            e.store(e.load(out, _F16, 64 * part), sums, MATRIX * part)
        e.store(e.load(row_sum + number * 64, _F16), sums, MATRIX * self._parts)
        e.store(e.load(row_max + number * 4, F32), self._tops + i * 4)

    def suspend(self, i: Value, out: Value, row_max: Value, row_sum: Value, number: Value) -> None:
        e, sums = self._e, self._sum(i)
        for part in range(self._parts):
            e.store(e.load(sums, _F16, MATRIX * part), out, 64 * part)
        e.store(e.load(sums, _F16, MATRIX * self._parts), row_sum + number * 64)
        e.store(e.load(self._tops + i * 4, F32), row_max + number * 4)

    def finish(self, i: Value, out: Value, epilogue: tuple[Value, Value, Value]) -> None:
        """Store the result of query i: normalized, scaled and rotated; epilogue: see `unit.Unit.finish`."""
        e, sums, order = self._e, self._sum(i), self._spec.order
        row_sum = e.sum_lanes(e.load(sums, _F16, MATRIX * self._parts))
        factor = e.const_like(1.0, row_sum) / row_sum
        if self._spec.is_scaled:
            factor = factor * e.load(epilogue[0], F32)
        for part in range(self._parts):
            x = e.load(sums, _F16, MATRIX * part) * factor
            if order > 1:
                x = x * e.load(epilogue[1], _F16, 64 * part)
            e.store(x, out if order == 1 else self._result, 64 * part)
        if order != 1:
            rotate(e, self._result, out, epilogue[2], self._dim, order)

    def _cap(self, scores: Value) -> Value:
        return apply_softcap(self._e, scores, self._e.const_like(self._args.softcap * LOG2_E, scores))

    def _mask(self, scores: Value, i: Value, start: Value, tokens: Value) -> None:
        """Scores of what a query does not see in a tile → LOWEST. start: the position of its first token."""
        e, sees, window, integers = self._e, self._args.sees, self._args.window, vector(I32, 16)
        lowest, highest = (e.load(self._positions + i * 8, I64, 8 * row) for row in (0, ROWS - 1))
        seen_by_all = e.imin(e.imax(lowest, sees) - start + 1, tokens)
        with e.when((seen_by_all < KEYS) | (start < highest - window + 1)), e.loop(0, ROWS) as row:
            position = e.load(self._positions + (i + row) * 8, I64)
            last = e.imax(e.imin(e.imax(position, sees) - start, tokens - 1), -1).trunc(I32)
            first = e.imin(e.imax(position - start - window + 1, 0), KEYS).trunc(I32)
            for number in range(KEYS // 16):
                places = e.constant(integers, list(range(16 * number, 16 * number + 16)))
                score = e.load(scores + row * 64, _F16, MATRIX * number)
                is_visible = (places <= last) & (places >= first)
                e.store(e.select(is_visible, score, e.const_like(LOWEST, score)), scores + row * 64, MATRIX * number)

    def _find_tops(self, scores: Value, i: Value) -> Value:
        """Set factors to what the scores of 16 queries from i on are reduced by; return the largest score of each.
        Where they have risen by more than _RISE it is a new number, and sums are rescaled."""
        e = self._e
        highest = [
            reduce(larger, [e.load(scores, _F16, MATRIX * number + 64 * row) for number in range(KEYS // 16)])
            for row in range(ROWS)
        ]
        address = self._tops + i * 4
        old, new = e.load(address, _F16), e.combine_rows(highest, larger)
        rises = new > old + _RISE
        with e.when(e.any(rises)):
            tops = e.select(rises, new, old)
            e.store(tops, address)
            e.store(e.select(rises, e.exp((old - tops) * math.log(2)), e.const_like(1.0, old)), self._factors)
            with e.loop(0, ROWS) as row:
                factor, sums = e.broadcast(self._factors + row * 4, F32, 16), self._sum(i) + row * 64
                for number in range(self._parts + 1):
                    e.store(e.load(sums, _F16, MATRIX * number) * factor, sums, MATRIX * number)
        tops = e.load(address, _F16)
        # Of keys that are not seen the weight is 0, also where none has been seen yet.
        e.store(e.select(tops > LOWEST, tops, e.zero(_F16)), self._factors)
        return new


def power_of_fraction(e: Emitter, x: Value) -> tuple[Value, Value]:
    """2^f where f is what x, float32, exceeds the nearest whole number by; and that number plus MAGIC. NaN where x is
    not finite."""
    shifted = x + MAGIC
    f, power = x - (shifted - MAGIC), e.const_like(_POWER[-1], x)
    for coefficient in _POWER[-2::-1]:
        power = e.fma(power, f, e.const_like(coefficient, x))
    return power, shifted
