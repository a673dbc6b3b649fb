"""The KV cache of a layer with its quantized blocks in tiles, and which layers have one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.kv.cache_tiles import tiles
from polarlm.engine.backends.native.kv.encoders import Encoder, encoder
from polarlm.engine.backends.numpy.kv.cache import Fields, LayerCache, Sides
from polarlm.engine.backends.numpy.kv.stored_blocks import full_slots, stored_blocks
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.jit.run.workers import aligned

_TILES = "tiles"


@dataclass
class TileCache(LayerCache):
    """The stored K/V of one layer, with quantized blocks in tiles, which kernels read.

    k, v: {"tiles": uint8 (K, quantized blocks, bytes of a tile)}. encoders: for keys and for values the encoder, or the
    reason why NumPy encodes them.
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
        """The caches of all kinds of blocks: the finer ones first."""
        return [self] if self.finer is None else [cast(TileCache, self.finer), self]

    @property
    def strides(self) -> dict[str, int]:
        """The arguments of kernels that say where blocks lie in `memory`, and how many means a head has."""
        keys, values = self.memory
        means = self.mean.get("mean", keys)
        return {
            "blocks": means.shape[1],
            "key_stride": keys.strides[0],
            "value_stride": values.strides[0],
            "key_bytes": keys.strides[1],
            "value_bytes": values.strides[1],
        }

    def of_one_block(self) -> TileCache:
        """A cache with the same format and slots, and memory of its own for one quantized block."""
        (k, v, mean), _ = _blocks(replace(self.format, finer=None), 1)
        return replace(self, k=k, v=v, mean=mean, finer=None)


class CacheOps:
    """The ops that size and allocate caches, and say what NumPy computes of them."""

    def __init__(self, plain: NumpyOps) -> None:
        self._plain = plain

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        _, full = self._plain.cache_bytes(format)
        return transfer.nbytes(format, transfer.TILES), full

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[LayerCache] = ()) -> LayerCache:
        """A `TileCache` where kernels can attend over it; else NumPy's cache, whose layer the ops leave to NumPy."""
        if isinstance(both := tiles(format), str) or (format.finer and isinstance(tiles(format.finer), str)):
            return self._plain.cache(format, quantized, full, beside)
        slots = full_slots(format, full)
        own, finer = _blocks(format, quantized)
        if finer is None or format.finer is None:
            return TileCache(format, *own, *slots, *both, _encoders(both, format))
        of_finer = tiles(format.finer)
        assert not isinstance(of_finer, str), of_finer
        more = TileCache(format.finer, *finer, *slots, *of_finer, _encoders(of_finer, format.finer))
        return TileCache(format, *own, *slots, *both, _encoders(both, format), finer=more)

    def in_numpy(self, cache: LayerCache) -> dict[str, str]:
        if isinstance(cache, TileCache):
            sides = zip(("keys", "values"), cache.encoders, strict=True)
            return {f"the encoding of {side}": why for side, why in sides if isinstance(why, str)}
        formats = [cache.format, *([cache.format.finer] if cache.format.finer else [])]
        why = next(found for format in formats if isinstance(found := tiles(format), str))
        return {"attention and encoding": why}


def _encoders(both: tuple[KeyTiles, ValueTiles], format: CacheFormat) -> tuple[Encoder | str, Encoder | str]:
    return encoder(both[0], format, 0), encoder(both[1], format, 1)


def _blocks(format: CacheFormat, count: int) -> tuple[Sides, Sides | None]:
    """Memory for `count` quantized blocks; see `stored_blocks`."""

    def memory(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return aligned(math.prod(shape)).reshape(shape)

    return stored_blocks(format, count, transfer.TILES, memory)
