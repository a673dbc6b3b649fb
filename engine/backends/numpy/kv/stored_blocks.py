"""Memory for the blocks of a cache: an array for each field, or one of bytes for two kinds of quantized blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.numpy.kv.cache import Buffer, Fields, Sides
from polarlm.engine.codecs import Field
from polarlm.engine.jit.run.buffers import aligned, zeros

SideFields = dict[str, dict[str, Field]]  # the arrays of a block of one KV head: keys "k", values "v", means "mean"


def stored_blocks(format: CacheFormat, count: int, stored_as: str) -> tuple[Sides, Sides | None]:
    """Return the arrays of `count` quantized blocks in the representation `stored_as`, and the high-precision kind's
    arrays if the format has one: as many as fit into the same memory."""
    sides = _sides(format, stored_as)
    means = {name: zeros((format.kv_heads, count, *field.shape), field.dtype) for name, field in sides["mean"].items()}
    if format.high_precision is None:
        k, v = (
            {name: _memory((format.kv_heads, count, *field.shape), field.dtype) for name, field in sides[side].items()}
            for side in "kv"
        )
        return Sides(k, v, means), None
    nbytes, high_precision_nbytes = (
        _nbytes(sides),
        _nbytes(high_precision_sides := _sides(format.high_precision, stored_as)),
    )
    whole = _memory((format.kv_heads, count * nbytes), np.uint8)
    # The means of a block have the block's id. High-precision blocks have small ids and others large ones, so they
    # never meet.
    blocks, high_precision = (
        _views(whole, sides, count),
        _views(whole, high_precision_sides, count * nbytes // high_precision_nbytes),
    )
    return Sides(*blocks, means), Sides(*high_precision, means)


def full_slots(format: CacheFormat, count: int) -> Buffer:
    """Return memory for the keys and the values of `count` full-precision slots."""
    shape = (count, format.kv_heads, format.block_size, format.head_dim)
    return zeros(shape, np.float16), zeros(shape, np.float16)


def _memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros whose address is a multiple of 64, which kernels need."""
    return aligned(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def _sides(format: CacheFormat, stored_as: str) -> SideFields:
    sides: SideFields = {"k": {}, "v": {}, "mean": {}}
    for array, field in transfer.block_arrays(format, stored_as).items():
        side, _, name = array.partition(".")
        sides[side][name] = field
    return sides


def _nbytes(sides: SideFields) -> int:
    """The bytes of a block of one KV head, without means."""
    return sum(field.nbytes for side in "kv" for field in sides[side].values())


def _views(whole: np.ndarray, sides: SideFields, count: int) -> tuple[Fields, Fields]:
    """Views of whole (K, bytes) uint8 as `count` blocks, whose fields follow each other: of keys and of values."""
    heads, step, offset = len(whole), _nbytes(sides), 0
    views: tuple[Fields, Fields] = {}, {}
    for fields, side in zip(views, "kv", strict=True):
        for name, field in sides[side].items():
            strides = whole.strides[0], step, *np.empty(field.shape, field.dtype).strides
            buffer = whole if count else np.empty(offset, np.uint8)
            fields[name] = np.ndarray((heads, count, *field.shape), field.dtype, buffer, offset, strides)
            offset += field.nbytes
    return views
