"""The KV store whose quantized blocks are tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.numpy.attention import LayerCache, Sides
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.jit.run.workers import aligned
from polarlm.engine.jit.run.zeros import zeros

_TILES = "tiles"


@dataclass
class TileCache(LayerCache):
    """The stored K/V of one layer, whose quantized blocks kernels read.

    k, v: {"tiles": uint8 (K, quantized blocks, bytes of a tile)}.
    """

    key_tiles: KeyTiles
    value_tiles: ValueTiles

    stored_as: ClassVar[str] = transfer.TILES

    def read(self, blocks: np.ndarray) -> Sides:
        k, v, mean = self.take(blocks)
        return Sides(self.key_tiles.unpack(k[_TILES]), self.value_tiles.unpack(v[_TILES]), mean)

    def write(self, blocks: Sequence[int], sides: Sides) -> None:
        k, v = self.key_tiles.pack(sides.k), self.value_tiles.pack(sides.v)
        self.put(blocks, Sides({_TILES: k}, {_TILES: v}, sides.mean))

    @property
    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """The tiles of keys and of values."""
        return self.k[_TILES], self.v[_TILES]


class CacheOps:
    """The ops that make caches."""

    def __init__(self, plain: NumpyOps) -> None:
        self._plain = plain
        self.without_kernels: set[str] = set()
        """Types of layers ("keys/values") that attend in NumPy, since no kernel reads both."""

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        _, full = self._plain.cache_bytes(format)
        return transfer.nbytes(format, transfer.TILES), full

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[LayerCache] = ()) -> LayerCache:
        """A `TileCache` where kernels read both codecs."""
        if (both := transfer.tiles(format)) is None:
            self.without_kernels.add(f"{format.codec_k.name}/{format.codec_v.name}")
            return self._plain.cache(format, quantized, full, beside)
        plain = self._plain.cache(format, 0, full)
        means = {
            name: zeros((format.kv_heads, quantized, *field.shape), field.dtype)
            for name, field in transfer.fields(format)["mean"].items()
        }
        k, v = (
            aligned(format.kv_heads * quantized * side.nbytes).reshape(format.kv_heads, quantized, side.nbytes)
            for side in both
        )
        return TileCache(format, {_TILES: k}, {_TILES: v}, means, plain.full_k, plain.full_v, *both)
