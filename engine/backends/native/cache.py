"""The KV store whose quantized blocks are tiles, and which layers have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.cache_tiles import tiles
from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.encoders import Encoder, encoder
from polarlm.engine.backends.numpy.attention import Fields, LayerCache, Sides
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.jit.run.workers import aligned
from polarlm.engine.jit.run.zeros import zeros

_TILES = "tiles"


@dataclass
class TileCache(LayerCache):
    """The stored K/V of one layer, whose quantized blocks kernels read.

    k, v: {"tiles": uint8 (K, quantized blocks, bytes of a tile)}. encoders: of keys and of values, or why NumPy encodes
    them.
    """

    key_tiles: KeyTiles
    value_tiles: ValueTiles
    encoders: tuple[Encoder | str, Encoder | str]

    stored_as: ClassVar[str] = transfer.TILES

    def read(self, blocks: np.ndarray) -> Sides:
        k, v, mean = self.take(blocks)
        return Sides(self.key_tiles.unpack(k[_TILES]), self.value_tiles.unpack(v[_TILES]), mean)

    def write(self, blocks: Sequence[int], sides: Sides) -> None:
        for side, fields in enumerate((sides.k, sides.v)):
            self.write_side(blocks, side, fields, {} if side else sides.mean)

    def write_side(self, blocks: Sequence[int], side: int, fields: Fields, mean: Fields) -> None:
        """Overwrite the keys (side 0) or the values (1) of quantized blocks. mean: of keys."""
        self.memory[side][:, blocks] = (self.key_tiles, self.value_tiles)[side].pack(fields)
        for name, x in mean.items():
            self.mean[name][:, blocks] = x

    @property
    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """The tiles of keys and of values."""
        return self.k[_TILES], self.v[_TILES]

    def of_one_block(self) -> TileCache:
        """A cache of the same format, with one quantized block and the same slots."""
        k, v, mean = _blocks(self.format, (self.key_tiles, self.value_tiles), 1)
        return replace(self, k=k, v=v, mean=mean)


class CacheOps:
    """The ops that make caches."""

    def __init__(self, plain: NumpyOps) -> None:
        self._plain = plain

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        _, full = self._plain.cache_bytes(format)
        return transfer.nbytes(format, transfer.TILES), full

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[LayerCache] = ()) -> LayerCache:
        """A `TileCache` where kernels attend; the ops leave layers with another one to NumPy."""
        if isinstance(both := tiles(format), str):
            return self._plain.cache(format, quantized, full, beside)
        slots = self._plain.cache(format, 0, full)
        encoders = encoder(both[0], format, 0), encoder(both[1], format, 1)
        return TileCache(format, *_blocks(format, both, quantized), slots.full_k, slots.full_v, *both, encoders)

    def in_numpy(self, cache: LayerCache) -> dict[str, str]:
        if isinstance(cache, TileCache):
            sides = zip(("keys", "values"), cache.encoders, strict=True)
            return {f"the encoding of {side}": why for side, why in sides if isinstance(why, str)}
        why = tiles(cache.format)
        assert isinstance(why, str)
        return {"attention and encoding": why}


def _blocks(format: CacheFormat, both: tuple[KeyTiles, ValueTiles], count: int) -> Sides:
    """Memory for quantized blocks."""
    heads = format.kv_heads
    k, v = (aligned(heads * count * side.nbytes).reshape(heads, count, side.nbytes) for side in both)
    means = {
        name: zeros((heads, count, *field.shape), field.dtype)
        for name, field in transfer.fields(format)["mean"].items()
    }
    return Sides({_TILES: k}, {_TILES: v}, means)
