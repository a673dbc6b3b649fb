"""Products of 16 queries with keys, and of their weights with values, all matrices of bfloat16 (`matrices`).

Each is a list of functions that emit it in parts, so that other work can be emitted between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

from polarlm.engine.backends.native.kernels.attention.matrices import (
    KEYS,
    MATRIX,
    STEP,
    key_matrices,
    value_matrices,
)
from polarlm.engine.jit.lang import F32, I32, Emitter, Matrices, Value, Values, vector

Work: TypeAlias = Callable[[], None]

_ROWS = 16
_F16, _PAIRS = vector(F32, _ROWS), vector(I32, _ROWS)
_ONE = 0x3F80  # bfloat16


class Products(Protocol):
    def score(self, queries: Value, keys: Value, out: Value) -> list[Work]:
        """Products of queries (D / 32 rounded up, 16, 32) with the keys of a tile → out (KEYS / 16, 16, 16)."""

    def add_values(self, sums: Value, values: Value, weights: Value) -> list[Work]:
        """Add weights (KEYS / 32, 16, 32) · values of a tile to sums (D / 16 + 1, 16, 16), and the sums of the weights
        of each row to any columns of the last one."""


def products(e: Emitter, dim: int) -> Products:
    """By registers of matrices where the level has any."""
    matrices = e.level.matrices
    return DotProducts(e, dim) if matrices is None else MatrixProducts(e, matrices, dim)


class MatrixProducts:
    """Each part is one instruction. What sums weights is a matrix whose first column is 1."""

    _SUM, _SCORES, _RIGHT, _WEIGHTS, _QUERIES = 0, (1, 2), (3, 4), (5, 6), 7  # registers

    def __init__(self, e: Emitter, matrices: Matrices, dim: int) -> None:
        self._e, self._matrices, self._dim = e, matrices, dim
        self._ones = e.constant_bytes((2 * _ONE.to_bytes(2, "little") + bytes(60)) * _ROWS)

    def score(self, queries: Value, keys: Value, out: Value) -> list[Work]:
        e, matrices, count, work = self._e, self._matrices, key_matrices(self._dim), list[Work]()
        for pair in range(0, KEYS // 16, 2):
            work += [partial(matrices.clear, e, total) for total in self._SCORES]
            for part in range(count):
                work.append(partial(matrices.load, e, self._QUERIES, queries + MATRIX * part))
                for number, (total, right) in enumerate(zip(self._SCORES, self._RIGHT, strict=True)):
                    work.append(partial(matrices.load, e, right, keys + MATRIX * (count * (pair + number) + part)))
                    work.append(partial(matrices.add_product, e, total, self._QUERIES, right))
            for number, total in enumerate(self._SCORES):
                work.append(partial(matrices.store, e, total, out + MATRIX * (pair + number)))
        return work

    def add_values(self, sums: Value, values: Value, weights: Value) -> list[Work]:
        e, matrices, parts, work = self._e, self._matrices, value_matrices(self._dim), list[Work]()
        for step, left in enumerate(self._WEIGHTS):
            work.append(partial(matrices.load, e, left, weights + MATRIX * step))
        for number in range(parts + 1):
            work.append(partial(matrices.load, e, self._SUM, sums + MATRIX * number))
            for step, (left, right) in enumerate(zip(self._WEIGHTS, self._RIGHT, strict=True)):
                address = self._ones if number == parts else values + MATRIX * (parts * step + number)
                work.append(partial(matrices.load, e, right, address))
                work.append(partial(matrices.add_product, e, self._SUM, left, right))
            work.append(partial(matrices.store, e, self._SUM, sums + MATRIX * number))
        return work


class _Right(NamedTuple):
    """Right matrices: the address of the first, and bytes to the next one's columns, and to its inputs."""

    address: Value
    next_column: int
    next_part: int


class DotProducts:
    """Each part is the sums of 8 rows and 32 columns, in vector registers. Each column of sums of weights has those of
    two of 32 tokens."""

    _TILE = 8

    def __init__(self, e: Emitter, dim: int) -> None:
        self._e, self._dim = e, dim

    def score(self, queries: Value, keys: Value, out: Value) -> list[Work]:
        parts = key_matrices(self._dim)
        return [
            partial(
                self._multiply,
                queries + 64 * row,
                _Right(keys + MATRIX * parts * first, MATRIX * parts, MATRIX),
                parts,
                [[self._e.zero(_F16)] * 2] * self._TILE,
                out + (MATRIX * first + 64 * row),
            )
            for first in range(0, KEYS // 16, 2)
            for row in range(0, _ROWS, self._TILE)
        ]

    def add_values(self, sums: Value, values: Value, weights: Value) -> list[Work]:
        count = value_matrices(self._dim)

        def add(first: int, row: int) -> None:
            out, columns = sums + (MATRIX * first + 64 * row), range(min(2, count - first))
            start = [
                [self._e.load(out, _F16, 64 * i + MATRIX * column) for column in columns] for i in range(self._TILE)
            ]
            right = _Right(values + MATRIX * first, MATRIX, MATRIX * count)
            self._multiply(weights + 64 * row, right, KEYS // STEP, start, out)

        pairs = [partial(add, first, row) for first in range(0, count, 2) for row in range(0, _ROWS, self._TILE)]
        return [*pairs, partial(self._sum_weights, weights, sums + MATRIX * count)]

    def _multiply(self, left: Value, right: _Right, parts: int, start: Sequence[Values], out: Value) -> None:
        """Rows of left matrices times right ones, added to a start, → out."""
        e, sums = self._e, [[self._e.variable(value) for value in row] for row in start]
        with e.loop(0, parts) as part, e.loop(0, 16) as pair:
            own, column = left + part * MATRIX + pair * 4, right.address + part * right.next_part + pair * 64
            columns = [e.load(column, _PAIRS, right.next_column * number) for number in range(len(sums[0]))]
            for i, row in enumerate(sums):
                inputs = e.broadcast(own, I32, 16, 64 * i)
                for total, pairs in zip(row, columns, strict=True):
                    total.set(e.level.dot2_bfloat(e, total.get(), inputs, pairs))
        for i, row in enumerate(sums):
            for number, total in enumerate(row):
                e.store(total.get(), out, 64 * i + MATRIX * number)

    def _sum_weights(self, weights: Value, sums: Value) -> None:
        e, ones = self._e, self._e.constant(_PAIRS, _ONE << 16 | _ONE)
        with e.loop(0, _ROWS) as row:
            total = e.load(sums + row * 64, _F16)
            for step in range(KEYS // STEP):
                total = e.level.dot2_bfloat(e, total, e.load(weights + row * 64, _PAIRS, MATRIX * step), ones)
            e.store(total, sums + row * 64)
