"""Memory for the quantized blocks of a cache: an array for each field, or one of bytes for two kinds of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.numpy.attention import read_blocks
from polarlm.engine.backends.numpy.kv.cache import Buffer, Fields, LayerCache, Sides
from polarlm.engine.codecs import Field
from polarlm.engine.jit.run.buffers import zeros

Make = Callable[[tuple[int, ...], Any], np.ndarray]


def stored_blocks(format: CacheFormat, count: int, stored_as: str, memory: Make = zeros) -> tuple[Sides, Sides | None]:
    """Return the arrays of `count` quantized blocks in the representation `stored_as`, and the finer kind's arrays if
    the format has one: as many as fit into the same memory.

    memory: makes the arrays of keys and of values, of a shape and a type.
    """
    sides = _sides(format, stored_as)
    means = {name: zeros((format.kv_heads, count, *of.shape), of.dtype) for name, of in sides["mean"].items()}
    if format.finer is None:
        k, v = (
            {name: memory((format.kv_heads, count, *of.shape), of.dtype) for name, of in sides[side].items()}
            for side in "kv"
        )
        return Sides(k, v, means), None
    own, finer = _nbytes(sides), _nbytes(both := _sides(format.finer, stored_as))
    whole = memory((format.kv_heads, count * own), np.uint8)
    # The means of a block have the block's id. Finer blocks have small ids and others large ones, so they never meet.
    (k, v), of_finer = _views(whole, sides, count), _views(whole, both, count * own // finer)
    return Sides(k, v, means), Sides(of_finer[0], of_finer[1], means)


def _sides(format: CacheFormat, stored_as: str) -> dict[str, dict[str, Field]]:
    """The arrays of a block of one KV head, of keys ("k"), of values ("v") and of means ("mean")."""
    sides: dict[str, dict[str, Field]] = {"k": {}, "v": {}, "mean": {}}
    for name, field in transfer.block_arrays(format, stored_as).items():
        side, _, own = name.partition(".")
        sides[side][own] = field
    return sides


def _nbytes(sides: Mapping[str, Mapping[str, Field]]) -> int:
    """The bytes of a block of one KV head, without means."""
    return sum(field.nbytes for side in "kv" for field in sides[side].values())


def _views(whole: np.ndarray, sides: Mapping[str, Mapping[str, Field]], count: int) -> list[Fields]:
    """Views of whole (K, bytes) uint8 as `count` blocks, whose fields follow each other: of keys and of values."""
    heads, step, offset = len(whole), _nbytes(sides), 0
    found: list[Fields] = [{}, {}]
    for fields, side in zip(found, "kv", strict=True):
        for name, field in sides[side].items():
            strides = whole.strides[0], step, *np.empty(field.shape, field.dtype).strides
            buffer = whole if count else np.empty(offset, np.uint8)
            fields[name] = np.ndarray((heads, count, *field.shape), field.dtype, buffer, offset, strides)
            offset += field.nbytes
    return found


def full_slots(format: CacheFormat, count: int) -> Buffer:
    """Return memory for the keys and the values of `count` full-precision slots."""
    shape = (count, format.kv_heads, format.block_size, format.head_dim)
    return zeros(shape, np.float16), zeros(shape, np.float16)


def decode_blocks(cache: LayerCache, blocks: Sequence[int]) -> Buffer:
    """See `Ops.decode_blocks`."""
    k, v, mean = read_blocks(cache, np.asarray(blocks, np.intp))
    if mean is not None:
        by_block = k.reshape(*mean.shape[:2], -1, mean.shape[2])
        by_block += mean[:, :, None]
    return k, v
