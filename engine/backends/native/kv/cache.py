"""The KV cache of a layer with its quantized blocks in tiles, and which layers have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles, tiles
from polarlm.engine.backends.native.kernels.attention.prompts import DecodeArguments, Decoding, decode
from polarlm.engine.backends.native.kernels.encode.unit import Block
from polarlm.engine.backends.native.kv.encoders import Encoder, encoder
from polarlm.engine.backends.native.launch import Prepared
from polarlm.engine.backends.numpy.kv.cache import Buffer, Fields, LayerCache, Sides
from polarlm.engine.backends.numpy.kv.stored_blocks import full_slots, stored_blocks
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.jit.lang import Kernel
from polarlm.model_loaders.forks import cached_property

_TILES = "tiles"


@dataclass
class TileCache(LayerCache):
    """The stored K/V of one layer, with quantized blocks in tiles, which kernels read.

    k, v: {"tiles": uint8 (K, quantized blocks, bytes of a tile)}. encoders: for keys and for values the encoder, or the
    reason why NumPy encodes them. encoding_one, decoding_one: the launches that encode and decode a single block, once
    they have been prepared.
    """

    key_tiles: KeyTiles
    value_tiles: ValueTiles
    encoders: tuple[Encoder | str, Encoder | str]
    encoding_one: Prepared | None = field(default=None, init=False)
    decoding_one: Prepared | None = field(default=None, init=False)

    stored_as: ClassVar[str] = transfer.TILES

    def read(self, blocks: np.ndarray) -> Sides:
        k, v, mean = self.take(blocks)
        return Sides(self.key_tiles.unpack(k[_TILES]), self.value_tiles.unpack(v[_TILES]), mean)

    def write(self, blocks: Sequence[int], sides: Sides) -> None:
        for side, fields in enumerate((sides.k, sides.v)):
            self.write_side(blocks, side, fields, {} if side else sides.mean)

    def write_side(self, blocks: Sequence[int], side: int, fields: Fields, mean: Fields) -> None:
        """Overwrite the keys (side 0) or the values (1) of quantized blocks. mean: the block means, of keys only."""
        self.memory[side][:, blocks] = (self.key_tiles, self.value_tiles)[side].pack(fields)
        for name, x in mean.items():
            self.mean[name][:, blocks] = x

    @property
    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """The tiles of keys and of values: uint8 (K, quantized blocks, bytes of a tile) each."""
        return self.k[_TILES], self.v[_TILES]

    @property
    def kinds(self) -> list[TileCache]:
        """The caches of all kinds of blocks: the high-precision ones first."""
        return [self] if self.high_precision is None else [cast(TileCache, self.high_precision), self]

    @property
    def strides(self) -> dict[str, int]:
        """The arguments of kernels that say where blocks lie in `memory`, and how many means a head has."""
        keys, values = self.memory
        return {
            "blocks": self.mean.get("mean", keys).shape[1],
            "key_stride": keys.strides[0],
            "value_stride": values.strides[0],
            "key_bytes": keys.strides[1],
            "value_bytes": values.strides[1],
        }

    @cached_property
    def block_addresses(self) -> dict[int, tuple[Encoder, np.ndarray, np.ndarray]]:
        """For each side that kernels encode: its encoder, the `Block` of block 0, without x, int64 (K, 1, its fields),
        and what each next block adds to it, int64 (its fields)."""
        of_sides = {}
        for side, of_side in enumerate(self.encoders):
            if isinstance(of_side, Encoder):
                first, steps = of_side.addresses[:, None].copy(), np.zeros(len(Block._fields), np.int64)
                for name, array in {"tiles": self.memory[side], **({} if side else self.mean)}.items():
                    field, heads = Block._fields.index(name), np.arange(len(array), dtype=np.int64)
                    first[:, 0, field] = array.ctypes.data + heads * array.strides[0]
                    steps[field] = array.strides[1]
                of_sides[side] = of_side, first, steps
        return of_sides

    @cached_property
    def decoding(self) -> tuple[Kernel[DecodeArguments], DecodeArguments]:
        """The kernel that decodes blocks, and its arguments without the blocks and what they are decoded to."""
        format = self.format
        spec = Decoding(self.key_tiles, self.value_tiles, format.mean_bits, format.block_size, format.head_dim)
        keys, values = self.memory
        read = {name: x.ctypes.data for name, x in {"keys": keys, "values": values, **self.mean}.items()}
        blank = dict.fromkeys(DecodeArguments._fields, None)
        return decode(spec), DecodeArguments(**{**blank, **read, **self.strides})

    def of_one_block(self) -> TileCache:
        """A cache with the same format and slots, and memory of its own for one quantized block."""
        (k, v, mean), _ = stored_blocks(replace(self.format, high_precision=None), 1, transfer.TILES)
        return replace(self, k=k, v=v, mean=mean, high_precision=None)


class CacheOps(NumpyOps):
    """The ops that size and allocate caches, and say what NumPy computes of them."""

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        return transfer.nbytes(format, transfer.TILES), super().cache_bytes(format)[1]

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[LayerCache] = ()) -> LayerCache:
        """A `TileCache` where kernels can attend over it; else NumPy's cache, whose layer the ops leave to NumPy."""
        if _reason(format) is not None:
            return super().cache(format, quantized, full, beside)
        blocks, high_precision_blocks = stored_blocks(format, quantized, transfer.TILES)
        slots, high_precision = full_slots(format, full), None
        if format.high_precision is not None and high_precision_blocks is not None:
            high_precision = _tile_cache(format.high_precision, high_precision_blocks, slots)
        return _tile_cache(format, blocks, slots, high_precision)

    def in_numpy(self, cache: LayerCache) -> dict[str, str]:
        if isinstance(cache, TileCache):
            sides = zip(("keys", "values"), cache.encoders, strict=True)
            return {f"the encoding of {side}": why for side, why in sides if isinstance(why, str)}
        return {"attention and encoding": _reason(cache.format) or ""}


def _reason(format: CacheFormat) -> str | None:
    """Why NumPy computes a layer with this format; None if kernels do."""
    reasons = [
        both for kind in (format, format.high_precision) if kind is not None and isinstance(both := tiles(kind), str)
    ]
    return reasons[0] if reasons else None


def _tile_cache(
    format: CacheFormat, blocks: Sides, slots: Buffer, high_precision: TileCache | None = None
) -> TileCache:
    both = tiles(format)
    assert not isinstance(both, str), both
    encoders = encoder(both[0], format, 0), encoder(both[1], format, 1)
    return TileCache(format, *blocks, *slots, *both, encoders, high_precision=high_precision)
