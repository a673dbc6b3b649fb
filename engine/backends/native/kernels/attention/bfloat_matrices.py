"""Attention of prompts by registers of matrices of bfloat16 (`Level.matrices`).

A right matrix is bfloat16 (16, 16, 2). A tile of KEYS tokens has

    keys    (KEYS / 16, D / 32 rounded up, 16, 16, 2)    16 pairs of channels, 16 tokens
    values  (KEYS / 32, D / 16, 16, 16, 2)               16 pairs of tokens, 16 channels

with zeros for channels beyond D. Queries, 16 at a time, are left matrices (D / 32 rounded up, 16, 32), and so are the
weights of a tile's keys for them. Weights are summed as they are rounded to bfloat16, not as they were before: a result
is a mean of the values then, whose rounding cannot move it by more than they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from polarlm.engine.backends.native.kernels.attention.matrices import KEYS, MATRIX, STEP, MatrixFormat
from polarlm.engine.backends.native.kernels.attention.matrix_unit import (
    MAGIC,
    ROWS,
    MatrixSegment,
    MatrixUnit,
    power_of_fraction,
)
from polarlm.engine.jit.lang import F32, I32, Emitter, Value, vector

Work: TypeAlias = Callable[[], None]

_F16 = vector(F32, 16)
_IN_TURN = [lane // 2 + lane % 2 * 16 for lane in range(32)]  # lanes of two halves of a vector in turn
_ONE = 0x3F80  # bfloat16
_SUM, _SCORES, _RIGHT, _WEIGHTS, _QUERIES = 0, (1, 2), (3, 4), (5, 6), 7  # registers
_SCORE_BYTES, _WEIGHT_BYTES = KEYS // 16 * MATRIX, KEYS // STEP * MATRIX  # of 16 queries and a tile


class BfloatMatrices(MatrixFormat):
    name = "bfloat"

    def key_bytes(self, dim: int) -> int:
        return KEYS // 16 * _key_matrices(dim) * MATRIX

    def value_bytes(self, dim: int) -> int:
        return KEYS // STEP * (dim // 16) * MATRIX

    def write_tile(self, e: Emitter, dim: int, sides: tuple[Value, Value], targets: tuple[Value, Value]) -> None:
        _write_keys(e, dim, sides[0], targets[0])
        _write_values(e, dim, sides[1], targets[1])


BFLOAT = BfloatMatrices()


def _key_matrices(dim: int) -> int:
    """Matrices of the keys of 16 tokens."""
    return -(-dim // STEP)


def _channels(e: Emitter, row: Value, first: int, dim: int, factor: Value | None = None) -> Value:
    """32 channels of a row (D,) float32 from `first` on, times factor → bfloat16; those beyond D are 0."""
    parts = [e.load(row, _F16, 4 * at) if at < dim else e.zero(_F16) for at in (first, first + 16)]
    low, high = (part if factor is None else part * factor for part in parts)
    return e.level.to_bfloat(e, low, high)


def _write_keys(e: Emitter, dim: int, k: Value, keys: Value) -> None:
    with e.loop(0, KEYS // 16) as group:
        rows = [k + group * (64 * dim) + 4 * dim * i for i in range(16)]
        for number in range(_key_matrices(dim)):
            pairs = [_channels(e, row, STEP * number, dim).bits(vector(I32, 16)) for row in rows]
            target = keys + (group * _key_matrices(dim) + number) * MATRIX
            for i, tokens in enumerate(e.transpose(pairs)):
                e.store(tokens, target, 64 * i)


def _write_values(e: Emitter, dim: int, v: Value, values: Value) -> None:
    for step in range(KEYS // STEP):
        with e.loop(0, STEP // 2) as pair:
            row = v + pair * (8 * dim)
            for number in range(dim // 16):
                low, high = (e.load(row, _F16, 4 * dim * (STEP * step + i) + 64 * number) for i in range(2))
                both = e.level.to_bfloat(e, low, high)
                e.store(e.shuffle(both, both, _IN_TURN), values + pair * 64, MATRIX * (dim // 16 * step + number))


class BfloatUnit(MatrixUnit):
    """Two times 16 queries take turns. While the weights of one with a tile are computed, the scores of the other with
    its next tile are, and the values of the last one are added to its sums. So a product never waits for weights."""

    format = BFLOAT

    @staticmethod
    def query_bytes(dim: int) -> int:
        return _key_matrices(dim) * MATRIX

    @contextmanager
    def registers(self) -> Iterator[None]:
        self._e.level.matrices.begin(self._e)
        self._ones = self._e.constant_bytes((2 * _ONE.to_bytes(2, "little") + bytes(60)) * ROWS)
        yield
        self._e.level.matrices.end(self._e)

    def write_query(self, queries: Value, row: Value, q: Value, factor: Value) -> None:
        for number in range(_key_matrices(self._dim)):
            channels = _channels(self._e, q, STEP * number, self._dim, factor)
            self._e.store(channels, queries + row * 64, MATRIX * number)

    def attend(
        self, first: Value, sides: tuple[Value, Value], segment: MatrixSegment, from_tile: Value, to_tile: Value
    ) -> None:
        e, (keys, values) = self._e, sides
        key_tile, value_tile = self.format.key_bytes(self._dim), self.format.value_bytes(self._dim)
        _run(self._score(self._queries_of(first), keys + from_tile * key_tile, self._scores))
        with e.loop(from_tile * 2, to_tile * 2) as turn:
            own, other, tile = turn % 2, (turn + 1) % 2, turn // 2
            i, beside = first + own * ROWS, first + other * ROWS
            scores, weights = self._scores + own * _SCORE_BYTES, self._weights + own * _WEIGHT_BYTES
            if self._spec.is_capped:
                with e.loop(0, _SCORE_BYTES, 64) as at:
                    e.store(self._cap(e.load(scores + at, _F16)), scores + at)
            self._mask(scores, i, segment.start + tile * KEYS, segment.tokens - tile * KEYS)
            self._find_tops(scores, i)
            next_tile, last_tile = e.imin((turn + 1) // 2, to_tile - 1), e.imax(turn - 1, 0) // 2
            work = self._score(
                self._queries_of(beside), keys + next_tile * key_tile, self._scores + other * _SCORE_BYTES
            )
            sums = e.select(turn > from_tile * 2, self._sum(beside), self._spare)
            work += self._add_values(sums, values + last_tile * value_tile, self._weights + other * _WEIGHT_BYTES)
            self._weigh(scores, weights, work)
        last = values + (to_tile - 1) * value_tile
        _run(self._add_values(self._sum(first + ROWS), last, self._weights + _WEIGHT_BYTES))

    def _score(self, queries: Value, keys: Value, out: Value) -> list[Work]:
        """Products of 16 queries with the keys of a tile → out (KEYS / 16, 16, 16), each part one instruction."""
        e, matrices, count, work = self._e, self._e.level.matrices, _key_matrices(self._dim), list[Work]()
        for pair in range(0, KEYS // 16, 2):
            work += [partial(matrices.clear, e, total) for total in _SCORES]
            for part in range(count):
                work.append(partial(matrices.load, e, _QUERIES, queries + MATRIX * part))
                for number, (total, right) in enumerate(zip(_SCORES, _RIGHT, strict=True)):
                    work.append(partial(matrices.load, e, right, keys + MATRIX * (count * (pair + number) + part)))
                    work.append(partial(matrices.add_product, e, total, _QUERIES, right))
            for number, total in enumerate(_SCORES):
                work.append(partial(matrices.store, e, total, out + MATRIX * (pair + number)))
        return work

    def _add_values(self, sums: Value, values: Value, weights: Value) -> list[Work]:
        """Add weights (KEYS / 32, 16, 32) · values of a tile to sums, and the weights of each row to the first column
        of the last matrix: what sums them is a matrix whose first column is 1."""
        e, matrices, parts, work = self._e, self._e.level.matrices, self._parts, list[Work]()
        for step, left in enumerate(_WEIGHTS):
            work.append(partial(matrices.load, e, left, weights + MATRIX * step))
        for number in range(parts + 1):
            work.append(partial(matrices.load, e, _SUM, sums + MATRIX * number))
            for step, (left, right) in enumerate(zip(_WEIGHTS, _RIGHT, strict=True)):
                address = self._ones if number == parts else values + MATRIX * (parts * step + number)
                work.append(partial(matrices.load, e, right, address))
                work.append(partial(matrices.add_product, e, _SUM, left, right))
            work.append(partial(matrices.store, e, _SUM, sums + MATRIX * number))
        return work

    def _weigh(self, scores: Value, weights: Value, work: Sequence[Work]) -> None:
        """Scores → weights 2^(score − top), with the work in between."""
        e, done = self._e, 0
        pairs = [(row, step) for row in range(ROWS) for step in range(KEYS // STEP)]
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
    power, shifted = power_of_fraction(e, x)
    return e.level.times_power(e, power, shifted - MAGIC)
