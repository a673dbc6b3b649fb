"""Keys and values of prompts as the right matrices of products.

S tokens of a head, rounded up to a multiple of KEYS, are tiles of KEYS of them, with zeros for tokens beyond the last
one. What a tile is made of says its `MatrixFormat`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.jit.lang import F32, Emitter, Kernel, Value, vector
from polarlm.engine.jit.lang.records import Int64, Pointer

KEYS = 64  # tokens of a tile
STEP = 32  # inputs of a matrix
MATRIX = 1024  # bytes: 16 rows or columns of 32 inputs
_F16 = vector(F32, 16)


class MatrixFormat:
    """Numbers of 16 bits that the queries, keys and values of a head of D channels become, a multiple of 16."""

    name: str

    def key_bytes(self, dim: int) -> int:
        """Bytes of the keys of a tile."""
        raise NotImplementedError

    def value_bytes(self, dim: int) -> int:
        """Bytes of the values of a tile."""
        raise NotImplementedError

    def write_tile(self, e: Emitter, dim: int, sides: tuple[Value, Value], targets: tuple[Value, Value]) -> None:
        """Sides k, v (KEYS, D) float32 → a tile's keys and values."""
        raise NotImplementedError


class MatrixArguments(NamedTuple):
    k: Pointer
    v: Pointer
    keys: Pointer
    values: Pointer
    head_stride: Int64
    tokens: Int64


@cache
def to_matrices(format: MatrixFormat, dim: int) -> Kernel[MatrixArguments]:
    """k, v (K, ≥ tokens, D) float32 → the matrices of each head's keys and values; one unit per KV head and tile.

    head_stride: bytes from head to head of k and of v. D is a multiple of 16.
    """
    row_bytes = 4 * dim
    side_bytes = KEYS * row_bytes

    def emit(e: Emitter, args: MatrixArguments, begin: Value, end: Value, scratch: Value) -> None:
        tiles = (args.tokens + (KEYS - 1)) // KEYS
        with e.loop(begin, end) as unit:
            first = unit % tiles * KEYS
            offset, left = unit // tiles * args.head_stride + first * row_bytes, args.tokens - first
            sides = [(side + offset, scratch + i * side_bytes) for i, side in enumerate((args.k, args.v))]
            with e.when(left < KEYS):
                for source, target in sides:
                    _pad(e, source, target, left * row_bytes, side_bytes)
            k, v = (e.select(left < KEYS, padded, own) for own, padded in sides)
            targets = args.keys + unit * format.key_bytes(dim), args.values + unit * format.value_bytes(dim)
            format.write_tile(e, dim, (k, v), targets)

    return Kernel(f"to_matrices_{format.name}_{dim}", emit, MatrixArguments, scratch=2 * side_bytes)


def _pad(e: Emitter, source: Value, target: Value, nbytes: Value, size: int) -> None:
    """Copy nbytes, a multiple of 64, and fill `size` bytes up with zeros."""
    with e.loop(0, nbytes, 64) as at:
        e.store(e.load(source + at, _F16), target + at)
    with e.loop(nbytes, size, 64) as at:
        e.store(e.zero(_F16), target + at)
