"""The KV store whose quantized blocks are tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native import codecs
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

    def read(self, blocks: np.ndarray) -> Sides:
        k, v, mean = super().read(blocks)
        return Sides(self.key_tiles.unpack(k[_TILES]), self.value_tiles.unpack(v[_TILES]), mean)

    def write(self, blocks: Sequence[int], sides: Sides) -> None:
        k, v = self.key_tiles.pack(sides.k), self.value_tiles.pack(sides.v)
        super().write(blocks, Sides({_TILES: k}, {_TILES: v}, sides.mean))

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
        quantized, full = self._plain.cache_bytes(format)
        if (both := tiles(format)) is None:
            return quantized, full
        means = sum(field.nbytes for field in transfer.fields(format)["mean"].values())
        return format.kv_heads * (sum(side.nbytes for side in both) + means), full

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[LayerCache] = ()) -> LayerCache:
        """A `TileCache` where kernels read both codecs."""
        if (both := tiles(format)) is None:
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


def tiles(format: CacheFormat) -> tuple[KeyTiles, ValueTiles] | None:
    """The tiles of a layer's keys and values; None if NumPy attends, since no kernel reads both of them."""
    n, dim = format.block_size, format.head_dim
    if n % 16 or dim % 8:
        return None
    k, v = codecs.keys(format.codec_k, n, dim), codecs.values(format.codec_v, n, dim)
    return None if k is None or v is None else (k, v)
