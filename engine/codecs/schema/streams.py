"""Streams: the codes and numbers of a block, independent of how bytes store them. Two adjacent codes may be one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from polarlm.engine.codecs.schema.planes import Planes, code_type


class FieldSpec(NamedTuple):
    """One array of an encoded block: N tokens of one KV head."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Stream(NamedTuple):
    """The codes or numbers of one kind in a block of one KV head. `codes` and `numbers` make streams.

    shape: one entry per token, pair or group. bits: bits per code, which are packed without unused bits; None for
    numbers, which are stored unchanged. dtype: of numbers, and of unpacked codes.
    """

    shape: tuple[int, ...]
    bits: int | None
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def field(self) -> FieldSpec:
        """The array that stores the stream."""
        if self.bits is None:
            return FieldSpec(self.shape, self.dtype)
        return FieldSpec((self.size * self.bits // 8,), np.dtype(np.uint8))

    def pack(self, x: np.ndarray) -> np.ndarray:
        """x (..., *shape) → (..., *field.shape). Codes are packed as the vectors of one run of `Planes`."""
        if self.bits is None:
            return x.astype(self.dtype, copy=False)
        lead, planes = x.shape[: x.ndim - len(self.shape)], _planes(self.bits)
        vectors = x.reshape(*lead, planes.run, self.size // planes.run)
        return planes.pack(vectors).reshape(*lead, *self.field.shape)

    def unpack(self, field: np.ndarray) -> np.ndarray:
        """The inverse of `pack`; codes are C-contiguous."""
        if self.bits is None:
            return field
        *lead, nbytes = field.shape
        planes = _planes(self.bits)
        vectors = field.reshape(*lead, planes.run * self.bits // 8, 8 * nbytes // (planes.run * self.bits))
        return planes.unpack(vectors, planes.run).reshape(*lead, *self.shape)


_planes = cache(Planes)


Schema = Mapping[str, Stream]
"""The streams of a block by name, in the order in which they are stored."""


def codes(bits: int, *shape: int) -> Stream:
    """A stream of codes of 2 to 8, 10 or 16 bits, uint8 or uint16. Their number is a multiple of a run of `Planes`."""
    return Stream(shape, None if bits in (8, 16) else bits, code_type(bits))


def numbers(dtype: DTypeLike, *shape: int) -> Stream:
    """A stream of numbers, which are stored unchanged."""
    return Stream(shape, None, np.dtype(dtype))


def pack(schema: Schema, streams: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Streams (..., *shape) → fields (..., *field.shape), in the order of the schema."""
    return {name: stream.pack(streams[name]) for name, stream in schema.items()}


def unpack(schema: Schema, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `pack`."""
    return {name: stream.unpack(fields[name]) for name, stream in schema.items()}


def leading_shape(schema: Schema, fields: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    """The leading dimensions that all fields share."""
    name, stream = next(iter(schema.items()))
    return fields[name].shape[: fields[name].ndim - len(stream.field.shape)]


def join(codes: np.ndarray, bits: int) -> np.ndarray:
    """Join two adjacent codes, the first in the low bits, so that one lookup decodes both: codes (..., 2n) uint8 below
    2^bits → (..., n), with bits ≤ 4 uint8; with 8 bits uint16."""
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u2")
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(bits)


def split(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `join`: (..., n) → (..., 2n) uint8."""
    if bits == 8:
        return np.ascontiguousarray(codes, "<u2").view(np.uint8)
    both = np.stack([codes & np.uint8(2**bits - 1), codes >> np.uint8(bits)], -1)
    return both.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def join_wide(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes (..., 2n) uint8 below 2^bits, the last axis contiguous → (..., n) uint16."""
    both = codes.view("<u2")
    return both if bits == 8 else both - (both >> 8) * np.uint16(256 - 2**bits)


def joined_table(points: np.ndarray, bits: int) -> np.ndarray:
    """points (2^bits, width) → the points of joined codes, (4^bits, 2·width)."""
    both = np.arange(4**bits)
    return np.concatenate([points[both & 2**bits - 1], points[both >> bits]], axis=1)
