"""Keys and values of prompts as the right matrices of products of bfloat16.

A right matrix is bfloat16 (16, 16, 2). For S tokens of a head, rounded up to a multiple of KEYS, there are

    keys    (S / 16, D / 32 rounded up, 16, 16, 2)    16 pairs of channels, 16 tokens
    values  (S / 32, D / 16, 16, 16, 2)               16 pairs of tokens, 16 channels

with zeros for channels beyond D and for tokens beyond the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from polarlm.engine.jit.lang import F32, I32, Emitter, Kernel, Matrices, Value, vector
from polarlm.engine.jit.lang.records import Int64, Pointer

KEYS = 64  # tokens of a tile
STEP = 32  # tokens of a left matrix of weights, and of a right matrix of values
MATRIX = 1024  # bytes
_F16 = vector(F32, 16)
_IN_TURN = [lane // 2 + lane % 2 * 16 for lane in range(32)]  # lanes of two halves of a vector in turn


def key_matrices(dim: int) -> int:
    """Matrices of the keys of 16 tokens."""
    return -(-dim // 32)


def value_matrices(dim: int) -> int:
    """Matrices of the values of STEP tokens."""
    return dim // 16


def key_bytes(dim: int) -> int:
    """Bytes of the keys of a tile."""
    return KEYS // 16 * key_matrices(dim) * MATRIX


def value_bytes(dim: int) -> int:
    """Bytes of the values of a tile."""
    return KEYS // STEP * value_matrices(dim) * MATRIX


class MatrixArguments(NamedTuple):
    k: Pointer
    v: Pointer
    keys: Pointer
    values: Pointer
    head_stride: Int64
    tokens: Int64


@cache
def to_matrices(dim: int) -> Kernel[MatrixArguments]:
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
            write_tile(e, dim, (k, v), (args.keys + unit * key_bytes(dim), args.values + unit * value_bytes(dim)))

    return Kernel(f"to_matrices_{dim}", emit, MatrixArguments, scratch=2 * side_bytes)


@contextmanager
def registers(e: Emitter) -> Iterator[None]:
    """What the context emits may use the registers of matrices that the level has, if it has any."""
    matrices: Matrices | None = e.level.matrices
    if matrices is not None:
        matrices.begin(e)
    yield
    if matrices is not None:
        matrices.end(e)


def _pad(e: Emitter, source: Value, target: Value, nbytes: Value, size: int) -> None:
    """Copy nbytes, a multiple of 64, and fill `size` bytes up with zeros."""
    with e.loop(0, nbytes, 64) as at:
        e.store(e.load(source + at, _F16), target + at)
    with e.loop(nbytes, size, 64) as at:
        e.store(e.zero(_F16), target + at)


def channels(e: Emitter, row: Value, first: int, dim: int, factor: Value | None = None) -> Value:
    """32 channels of a row (D,) float32 from `first` on, times factor → bfloat16; those beyond D are 0."""
    parts = [e.load(row, _F16, 4 * at) if at < dim else e.zero(_F16) for at in (first, first + 16)]
    low, high = (part if factor is None else part * factor for part in parts)
    return e.level.to_bfloat(e, low, high)


def write_tile(e: Emitter, dim: int, sides: tuple[Value, Value], targets: tuple[Value, Value]) -> None:
    """Sides k, v (KEYS, D) float32 → the matrices of a tile."""
    _write_keys(e, dim, sides[0], targets[0])
    _write_values(e, dim, sides[1], targets[1])


def _write_keys(e: Emitter, dim: int, k: Value, keys: Value) -> None:
    with e.loop(0, KEYS // 16) as group:
        rows = [k + group * (64 * dim) + 4 * dim * i for i in range(16)]
        for number in range(key_matrices(dim)):
            pairs = [channels(e, row, 32 * number, dim).bits(vector(I32, 16)) for row in rows]
            target = keys + (group * key_matrices(dim) + number) * MATRIX
            for i, tokens in enumerate(e.transpose(pairs)):
                e.store(tokens, target, 64 * i)


def _write_values(e: Emitter, dim: int, v: Value, values: Value) -> None:
    for step in range(KEYS // STEP):
        with e.loop(0, STEP // 2) as pair:
            row = v + pair * (8 * dim)
            for number in range(value_matrices(dim)):
                low, high = (e.load(row, _F16, 4 * dim * (STEP * step + i) + 64 * number) for i in range(2))
                both = e.level.to_bfloat(e, low, high)
                target = values + pair * 64
                e.store(e.shuffle(both, both, _IN_TURN), target, MATRIX * (value_matrices(dim) * step + number))
