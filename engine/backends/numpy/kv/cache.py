"""The stored K/V of one layer in NumPy, and its memory: an array for each field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat, KVLocation
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
    full_k, full_v: (slots, K, N, D) float16: blocks in full precision. They are one array if values are keys.
    number: of the layer; layers one after another have the parts of a prompt's buffer in turn.
    """

    stored_as: ClassVar[str] = transfer.FIELDS

    format: CacheFormat
    k: Mapping[str, np.ndarray]
    v: Mapping[str, np.ndarray]
    mean: Mapping[str, np.ndarray]
    full_k: np.ndarray
    full_v: np.ndarray
    number: int = field(default=0, kw_only=True)

    def take(self, blocks: np.ndarray) -> Sides:
        """A copy of the quantized blocks with these ids, in the representation of `stored_as`."""
        arrays = self.k, self.v, self.mean
        return Sides(*({name: array.take(blocks, axis=1) for name, array in side.items()} for side in arrays))

    def put(self, blocks: Sequence[int], sides: Sides) -> None:
        """Overwrite the quantized blocks with these ids by `sides`, as `take` returns them."""
        for side, fields in zip((self.k, self.v, self.mean), sides, strict=True):
            for name, array in side.items():
                array[:, blocks] = fields[name]

    def read(self, blocks: np.ndarray) -> Sides:
        """The fields of the quantized blocks with these ids."""
        return self.take(blocks)

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


def stored_blocks(format: CacheFormat, count: int, stored_as: str) -> Sides:
    """Return the arrays of `count` quantized blocks in the representation `stored_as`."""
    sides: dict[str, Fields] = {side: {} for side in Sides._fields}
    for array, stored in transfer.block_arrays(format, stored_as).items():
        side, _, name = array.partition(".")
        memory = zeros if side == "mean" else _memory
        sides[side][name] = memory((format.kv_heads, count, *stored.shape), stored.dtype)
    return Sides(**sides)


def full_slots(format: CacheFormat, count: int) -> Buffer:
    """Return memory for the keys and the values of `count` full-precision slots."""
    shape = (count, format.kv_heads, format.block_size, format.head_dim)
    keys = zeros(shape, np.float16)
    return keys, keys if format.codec_v is None else zeros(shape, np.float16)


def _memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros whose address is a multiple of 64, which kernels need."""
    return aligned_bytes(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
