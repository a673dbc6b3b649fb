"""The stored K/V of one layer in NumPy, and its memory: an array for each field, or one of bytes for two kinds of
blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat, KVLocation
from polarlm.engine.codecs import Field
from polarlm.engine.jit.run.buffers import aligned_bytes, zeros

Fields = dict[str, np.ndarray]
Buffer = tuple[np.ndarray, np.ndarray]  # k, v (K, S, D) float32 or float16; in a prompt's K of several layers


class Sides(NamedTuple):
    """The fields of quantized blocks, each (K, blocks, …): of keys, of values, and of the keys' block means."""

    k: Fields
    v: Fields
    mean: Fields


@dataclass
class LayerCache:
    """The stored K/V of one layer.

    k, v: field name → (K, quantized blocks, *field shape), in the codec's dtypes.
    mean: the fields of the keys' block means (K, quantized blocks, …); empty when keys are not centred.
    full_k, full_v: (slots, K, N, D) float16: sink blocks and current blocks. They are one array if values are keys.
    high_precision: the cache of blocks with more bits, if there are two kinds; it has the same slots, and its blocks
    are in the same memory. number: of the layer; layers one after another have the parts of a prompt's buffer in turn.
    """

    stored_as: ClassVar[str] = transfer.FIELDS

    format: CacheFormat
    k: Mapping[str, np.ndarray]
    v: Mapping[str, np.ndarray]
    mean: Mapping[str, np.ndarray]
    full_k: np.ndarray
    full_v: np.ndarray
    high_precision: LayerCache | None = field(default=None, kw_only=True)
    number: int = field(default=0, kw_only=True)

    @property
    def code_bytes(self) -> int:
        """Bytes of a quantized block of one KV head, without block means."""
        arrays = [*self.k.values(), *self.v.values()]
        return sum(array.itemsize * math.prod(array.shape[2:]) for array in arrays)

    def move(self, target: int, source: int) -> None:
        """Copy a quantized block to another."""
        for array in (*self.k.values(), *self.v.values(), *self.mean.values()):
            array[:, target] = array[:, source]

    def take(self, blocks: np.ndarray) -> Sides:
        """A copy of the quantized blocks with these ids, in the representation of `stored_as`."""
        arrays = self.k, self.v, self.mean
        return Sides(*({name: _take_blocks(array, blocks) for name, array in side.items()} for side in arrays))

    def put(self, blocks: Sequence[int], sides: Sides) -> None:
        """Overwrite the quantized blocks with these ids by `sides`, as `take` returns them."""
        for side, fields in zip((self.k, self.v, self.mean), sides, strict=True):
            for name, array in side.items():
                array[:, blocks] = fields[name]

    def read(self, blocks: np.ndarray) -> Sides:
        """The fields of the quantized blocks with these ids."""
        return self.take(blocks)

    def write(self, blocks: Sequence[int], sides: Sides) -> None:
        """Overwrite the quantized blocks with these ids by fields, as `read` returns them."""
        self.put(blocks, sides)

    def full(self, place: KVLocation) -> Buffer:
        """Views k, v (K, S, D) of `place`: the N tokens of a slot, float16, or a buffer's tokens from that block on."""
        if place.buffer is None:
            return self.full_k[place.block], self.full_v[place.block]
        (k, v), first = self.part_of(place.buffer), place.block * self.format.block_size
        return k[:, first:], v[:, first:]

    def part_of(self, buffer: Buffer) -> Buffer:
        """The layer's part (K, S, D) of a buffer, which has the heads of several layers one after another."""
        (k, v), heads = buffer, self.format.kv_heads
        first = self.number * heads % len(k)
        return k[first : first + heads], v[first : first + heads]

    def store(self, place: KVLocation, kv: Buffer, first: int = 0) -> None:
        """Write k, v (K, T, D) to the tokens from `first` on at `place`, as `transfer.round_to` says."""
        for full, x in zip(self.full(place), kv, strict=True):
            full[:, first : first + x.shape[1]] = transfer.round_to(x, full.dtype)

    def complete(self, places: Sequence[KVLocation]) -> Buffer:
        """k, v (K, B, N, D) float32 of B complete blocks, in full-precision slots or consecutive in a buffer."""
        if places[0].buffer is None:
            slots = [place.block for place in places]
            k, v = (full[slots].swapaxes(0, 1).astype(np.float32) for full in (self.full_k, self.full_v))
            return k, v
        format, count = self.format, len(places)
        shape = format.kv_heads, count, format.block_size, format.head_dim
        k, v = (
            x[:, : count * format.block_size].reshape(shape).astype(np.float32, copy=False)
            for x in self.full(places[0])
        )
        return k, v


AnyCache = TypeVar("AnyCache", bound=LayerCache)  # one type for both kinds of blocks


def _take_blocks(array: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """array[:, blocks], contiguous. `np.take` would copy a whole array even where a high-precision kind has a part."""
    return array.take(blocks, axis=1) if array.flags.c_contiguous else np.ascontiguousarray(array[:, blocks])


SideFields = dict[str, dict[str, Field]]  # the arrays of a block of one KV head: keys "k", values "v", means "mean"


def stored_blocks(format: CacheFormat, count: int, stored_as: str) -> tuple[Sides, Sides | None]:
    """Return the arrays of `count` quantized blocks in the representation `stored_as`, and those of high-precision ones
    if the format has these: as many as fit into the same memory."""
    sides = _sides(format, stored_as)
    means = {
        name: zeros((format.kv_heads, count, *stored.shape), stored.dtype) for name, stored in sides["mean"].items()
    }
    if format.high_precision is None:
        k, v = (
            {
                name: _memory((format.kv_heads, count, *stored.shape), stored.dtype)
                for name, stored in sides[side].items()
            }
            for side in "kv"
        )
        return Sides(k, v, means), None
    nbytes, high_nbytes = _nbytes(sides), _nbytes(high_sides := _sides(format.high_precision, stored_as))
    whole = _memory((format.kv_heads, count * nbytes), np.uint8)
    # The mean of a block lies at the block's id: high-precision blocks have small ids and others large ones.
    blocks, high_precision = _views(whole, sides, count), _views(whole, high_sides, count * nbytes // high_nbytes)
    return Sides(*blocks, means), Sides(*high_precision, means)


def full_slots(format: CacheFormat, count: int) -> Buffer:
    """Return memory for the keys and the values of `count` full-precision slots."""
    shape = (count, format.kv_heads, format.block_size, format.head_dim)
    keys = zeros(shape, np.float16)
    return keys, keys if format.codec_v is None else zeros(shape, np.float16)


def _memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros whose address is a multiple of 64, which kernels need."""
    return aligned_bytes(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def _sides(format: CacheFormat, stored_as: str) -> SideFields:
    sides: SideFields = {"k": {}, "v": {}, "mean": {}}
    for array, stored in transfer.block_arrays(format, stored_as).items():
        side, _, name = array.partition(".")
        sides[side][name] = stored
    return sides


def _nbytes(sides: SideFields) -> int:
    """The bytes of a block of one KV head, without means."""
    return sum(stored.nbytes for side in "kv" for stored in sides[side].values())


def _views(whole: np.ndarray, sides: SideFields, count: int) -> tuple[Fields, Fields]:
    """Views of whole (K, bytes) uint8 as `count` blocks, whose fields follow each other: of keys and of values."""
    heads, step, offset = len(whole), _nbytes(sides), 0
    views: tuple[Fields, Fields] = {}, {}
    for fields, side in zip(views, "kv", strict=True):
        for name, stored in sides[side].items():
            strides = whole.strides[0], step, *np.empty(stored.shape, stored.dtype).strides
            buffer = whole if count else np.empty(offset, np.uint8)
            fields[name] = np.ndarray((heads, count, *stored.shape), stored.dtype, buffer, offset, strides)
            offset += stored.nbytes
    return views
