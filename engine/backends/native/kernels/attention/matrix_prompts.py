"""Attention of many rows of one sequence by products of matrices of bfloat16, with online softmax.

Queries, 16 at a time, are left matrices, and so are the weights of a tile's keys for them; keys and values are right
ones (`matrices`). Scores and sums are float32, in scratch. The logarithms of weights are to the base 2: queries are
multiplied by log₂ e. Weights are summed as they are rounded to bfloat16, not as they were before: a result is a mean of
the values then, whose rounding cannot move it by more than they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.attention.matrices import (
    KEYS,
    MATRIX,
    STEP,
    channels,
    key_bytes,
    key_matrices,
    registers,
    value_bytes,
    value_matrices,
)
from polarlm.engine.backends.native.kernels.attention.matrix_products import Work, products
from polarlm.engine.backends.native.kernels.attention.partials import LOWEST
from polarlm.engine.backends.native.kernels.attention.prompts import PromptArguments, UnitRows, for_each_unit
from polarlm.engine.backends.native.kernels.attention.unit import LOG2_E, Prompt, larger
from polarlm.engine.backends.native.kernels.multiply import offsets, rotate
from polarlm.engine.backends.native.kernels.rows import apply_softcap
from polarlm.engine.jit.lang import F32, I32, I64, Emitter, Kernel, Value, Values, vector
from polarlm.engine.jit.lang.records import Int64, Pointer, read
from polarlm.engine.jit.run.workers import SCRATCH

_ROWS = 16  # queries of a left matrix
_PAIR = 2 * _ROWS  # queries that attend in turn
_SIZES = 384, 192  # most queries of a unit: as many as scratch has room for read keys and values less often
_CACHED = 1024  # keys that all queries of a unit attend to before the next ones: they stay in the cache of level 2
_RISE = 8.0  # sums are rescaled when a score exceeds what its row's scores are reduced by, by more: weights reach 2⁸
_F16 = vector(F32, 16)
_SCORE_BYTES, _WEIGHT_BYTES = KEYS // 16 * MATRIX, KEYS // STEP * MATRIX  # of 16 queries and a tile
# Coefficients of 2^f, lowest power first, for |f| ≤ ½, whose largest relative error, 7.5e-5, is least: bfloat16 rounds
# by up to 2⁻⁸.
_POWER = 0.999928057, 0.693260968, 0.242611125, 0.0551716685


def arrays(dim: int, queries: int) -> list[int]:
    """Offsets of the arrays of a unit of so many queries in scratch, and their end. They are float32 if not said
    otherwise.

    For each of two times 16 queries: scores (KEYS / 16, 16, 16) with a tile; their weights (KEYS / 32, 16, 32)
    bfloat16. factors (16,): what a row's scores are reduced by, or its sums multiplied by. positions, int64, of all
    queries. result (D,). For each 16 queries: left (D / 32 rounded up, 16, 32) bfloat16, times the scale and log₂ e;
    sums (D / 16 + 1, 16, 16), of weighted values, and in the columns of the last matrix of weights. spare: sums of
    16 queries that nobody reads. tops: for each query what its scores are reduced by.
    """
    left, sums = key_matrices(dim) * _ROWS, (value_matrices(dim) + 1) * _ROWS
    scores, weights = 2 * _SCORE_BYTES // 4, 2 * _WEIGHT_BYTES // 4
    places = 2 * queries, dim, queries * left, queries * sums, _ROWS * sums, queries
    return offsets(scores, weights, _ROWS, *places)


@cache
def most_queries(dim: int) -> int:
    """The most queries of a unit with heads of `dim` channels; 0 if there is no kernel for them."""
    return next((size for size in _SIZES if dim % 16 == 0 and arrays(dim, size)[-1] <= SCRATCH), 0)


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


@cache
def attend_by_matrices(spec: Prompt) -> Kernel[PromptArguments]:
    """As `attend`, with at most `most_queries` queries of a unit, and a `MatrixSegment` for each segment. What row_max
    holds are numbers that scores times log₂ e exceed by up to _RISE. row_sum is (T, H, 16): parts of each sum."""
    places = arrays(spec.dim, most_queries(spec.dim))

    def emit(e: Emitter, args: PromptArguments, begin: Value, end: Value, scratch: Value) -> None:
        state = _Unit(e, spec, [scratch + place for place in places[:-1]], args)

        def attend_to_segments(rows: UnitRows) -> None:
            with e.loop(0, args.count) as index:
                segment = read(e, MatrixSegment, args.segments, index)
                keys = segment.keys + rows.head * segment.key_stride
                values = segment.values + rows.head * segment.value_stride
                oldest, visible = _visible_keys(e, rows.position, rows.last, segment, args)
                with e.loop(oldest, visible, _CACHED) as cached, e.loop(0, rows.queries, _PAIR) as first:
                    oldest, visible = _visible_keys(e, *state.positions(first), segment, args)
                    oldest, visible = e.imax(oldest, cached), e.imin(visible, cached + _CACHED)
                    with e.when(oldest < visible):
                        state.attend(first, (keys, values), segment, oldest // KEYS, (visible + (KEYS - 1)) // KEYS)

        with registers(e):
            for_each_unit(e, spec, args, state, (begin, end), attend_to_segments)

    return Kernel(f"{spec.name}_by_matrices", emit, PromptArguments, scratch=places[-1])


def _visible_keys(
    e: Emitter, position: Value, last: Value, segment: MatrixSegment, args: PromptArguments
) -> tuple[Value, Value]:
    """The first tile's first key that rows from `position` to `last` see, and the end of those that they see."""
    oldest = e.imax(position - args.window + 1 - segment.start, 0) // KEYS * KEYS
    return oldest, e.imin(segment.tokens, e.imax(last, args.sees) + 1 - segment.start)


class _Unit:
    """Emits the work of a unit on its queries. Their state is in scratch."""

    def __init__(self, e: Emitter, spec: Prompt, scratch: Values, args: PromptArguments) -> None:
        self._e, self._spec, self._dim, self._args = e, spec, spec.dim, args
        self._scores, self._weights, self._factors, self._positions, self._result, *of_queries = scratch
        self._left, self._sums, self._spare, self._tops = of_queries
        self._products = products(e, spec.dim)
        self._parts = value_matrices(spec.dim)  # matrices of weighted values, before the one of weights

    def _query(self, i: Value) -> Value:
        """Row i of the first matrix of queries."""
        return self._left + i // _ROWS * (key_matrices(self._dim) * MATRIX) + i % _ROWS * 64

    def _sum(self, i: Value) -> Value:
        """Row i of the first matrix of sums."""
        return self._sums + i // _ROWS * ((self._parts + 1) * MATRIX) + i % _ROWS * 64

    def positions(self, first: Value) -> tuple[Value, Value]:
        """Of the first and the last of a pair of 16 queries."""
        address = self._positions + first * 8
        return self._e.load(address, I64), self._e.load(address, I64, 8 * (_PAIR - 1))

    def open(self, i: Value, position: Value, q: Value, scale: Value, sink: Value | None = None) -> None:
        """Initialize query i from q (D,), times scale, with empty sums, or with the score at `sink`."""
        e, left, sums = self._e, self._query(i), self._sum(i)
        for number in range(key_matrices(self._dim)):
            e.store(channels(e, q, 32 * number, self._dim, scale * LOG2_E), left, MATRIX * number)
        for number in range(self._parts + 1):
            e.store(e.zero(_F16), sums, MATRIX * number)
        if sink is not None:
            e.store(e.constant(F32, 1.0), sums, MATRIX * self._parts)
        e.store(e.constant(F32, LOWEST) if sink is None else e.load(sink, F32) * LOG2_E, self._tops + i * 4)
        e.store(position, self._positions + i * 8)

    def pad_queries(self, queries: Value, position: Value) -> None:
        """Initialize padding queries up to a multiple of 32; their results are not read."""
        e = self._e
        with e.loop(queries, (queries + (_PAIR - 1)) // _PAIR * _PAIR) as i:
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

    def attend(
        self, first: Value, sides: tuple[Value, Value], segment: MatrixSegment, from_tile: Value, to_tile: Value
    ) -> None:
        """Attend with two times 16 queries from `first` on to consecutive tiles of the keys and values of a head.

        The two take turns. While the weights of one with a tile are computed, the scores of the other with its next
        tile are, and the values of the last one are added to its sums. So a product never waits for weights.
        """
        e, (keys, values) = self._e, sides
        key_tile, value_tile = key_bytes(self._dim), value_bytes(self._dim)
        _run(self._products.score(self._query(first), keys + from_tile * key_tile, self._scores))
        with e.loop(from_tile * 2, to_tile * 2) as turn:
            own, other, tile = turn % 2, (turn + 1) % 2, turn // 2
            i, beside = first + own * _ROWS, first + other * _ROWS
            scores, weights = self._scores + own * _SCORE_BYTES, self._weights + own * _WEIGHT_BYTES
            if self._spec.is_capped:
                self._cap(scores)
            self._mask(scores, i, segment.start + tile * KEYS, segment.tokens - tile * KEYS)
            self._find_tops(scores, i)
            next_tile, last_tile = e.imin((turn + 1) // 2, to_tile - 1), e.imax(turn - 1, 0) // 2
            work = self._products.score(
                self._query(beside), keys + next_tile * key_tile, self._scores + other * _SCORE_BYTES
            )
            sums = e.select(turn > from_tile * 2, self._sum(beside), self._spare)
            work += self._products.add_values(
                sums, values + last_tile * value_tile, self._weights + other * _WEIGHT_BYTES
            )
            self._weigh(scores, weights, work)
        last = values + (to_tile - 1) * value_tile
        _run(self._products.add_values(self._sum(first + _ROWS), last, self._weights + _WEIGHT_BYTES))

    def _cap(self, scores: Value) -> None:
        e, cap = self._e, self._args.softcap * LOG2_E  # as scores are
        with e.loop(0, _SCORE_BYTES, 64) as at:
            score = e.load(scores + at, _F16)
            e.store(apply_softcap(e, score, e.const_like(cap, score)), scores + at)

    def _mask(self, scores: Value, i: Value, start: Value, tokens: Value) -> None:
        """Scores of what a query does not see in a tile → LOWEST. start: the position of its first token."""
        e, sees, window, integers = self._e, self._args.sees, self._args.window, vector(I32, 16)
        lowest, highest = (e.load(self._positions + i * 8, I64, 8 * row) for row in (0, _ROWS - 1))
        seen_by_all = e.imin(e.imax(lowest, sees) - start + 1, tokens)
        with e.when((seen_by_all < KEYS) | (start < highest - window + 1)), e.loop(0, _ROWS) as row:
            position = e.load(self._positions + (i + row) * 8, I64)
            last = e.imax(e.imin(e.imax(position, sees) - start, tokens - 1), -1).trunc(I32)
            first = e.imin(e.imax(position - start - window + 1, 0), KEYS).trunc(I32)
            for number in range(KEYS // 16):
                places = e.constant(integers, list(range(16 * number, 16 * number + 16)))
                score = e.load(scores + row * 64, _F16, MATRIX * number)
                is_visible = (places <= last) & (places >= first)
                e.store(e.select(is_visible, score, e.const_like(LOWEST, score)), scores + row * 64, MATRIX * number)

    def _find_tops(self, scores: Value, i: Value) -> None:
        """Set factors to what the scores of 16 queries from i on are reduced by. Where they have risen by more than
        _RISE it is a new number, and sums are rescaled."""
        e = self._e
        highest = [
            reduce(larger, [e.load(scores, _F16, MATRIX * number + 64 * row) for number in range(KEYS // 16)])
            for row in range(_ROWS)
        ]
        address = self._tops + i * 4
        old, new = e.load(address, _F16), _largest(e, highest)
        rises = new > old + _RISE
        with e.when(e.any(rises)):
            tops = e.select(rises, new, old)
            e.store(tops, address)
            e.store(e.select(rises, e.exp((old - tops) * math.log(2)), e.const_like(1.0, old)), self._factors)
            with e.loop(0, _ROWS) as row:
                factor, sums = e.broadcast(self._factors + row * 4, F32, 16), self._sum(i) + row * 64
                for number in range(self._parts + 1):
                    e.store(e.load(sums, _F16, MATRIX * number) * factor, sums, MATRIX * number)
        tops = e.load(address, _F16)
        # Of keys that are not seen the weight is 0, also where none has been seen yet.
        e.store(e.select(tops > LOWEST, tops, e.zero(_F16)), self._factors)

    def _weigh(self, scores: Value, weights: Value, work: Sequence[Work]) -> None:
        """Scores → weights 2^(score − top), with the work in between."""
        e, done = self._e, 0
        pairs = [(row, step) for row in range(_ROWS) for step in range(KEYS // STEP)]
        for number, (row, step) in enumerate(pairs, start=1):
            top = e.broadcast(self._factors, F32, 16, 4 * row)
            places = (MATRIX * (2 * step + half) + 64 * row for half in range(2))
            low, high = (_power(e, e.load(scores, _F16, place) - top) for place in places)
            e.store(e.level.to_bfloat(e, low, high), weights, MATRIX * step + 64 * row)
            until = len(work) * number // len(pairs)
            _run(work[done:until])
            done = until


def _run(work: Sequence[Work]) -> None:
    for emit in work:
        emit()


def _power(e: Emitter, x: Value) -> Value:
    """2^x of float32 that are not above 127; NaN where x is not finite. The relative error is up to 7.5e-5."""
    magic = e.const_like(12582912.0, x)  # 1.5 · 2²³: the unit of its last bit is 1
    whole = (x + magic) - magic
    f, y = x - whole, e.const_like(_POWER[-1], x)
    for coefficient in _POWER[-2::-1]:
        y = e.fma(y, f, e.const_like(coefficient, x))
    return e.level.times_power(e, y, whole)


def _largest(e: Emitter, rows: Values) -> Value:
    """16 vectors of 16 → a vector of the largest of each."""
    while len(rows) > 1:
        evens, odds = range(0, 32, 2), range(1, 32, 2)
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [larger(e.shuffle(a, b, evens), e.shuffle(a, b, odds)) for a, b in pairs]
    return rows[0]
