"""The KV cache of a layer with its quantized blocks in tiles, which layers have one, and what kernels need to encode
its keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import KeyTiles, Tiles, ValueTiles, tiles
from polarlm.engine.backends.native.kernels.attention.matrices import KEYS, MatrixFormat
from polarlm.engine.backends.native.kernels.attention.prompts import DecodeArguments, DecodingSpec, decode
from polarlm.engine.backends.native.kernels.encode.unit import BlockAddresses, EncodeArguments, side_of
from polarlm.engine.backends.numpy.kv.cache import Fields, LayerCache, Sides, full_slots, stored_blocks
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.jit.lang.records import address
from polarlm.engine.jit.run.workers import SCRATCH
from polarlm.engine.quantization.metric import Metric, residue_costs
from polarlm.model_loaders.forks import cached_property


@dataclass(frozen=True, eq=False)
class BlockEncoder:
    """A kernel and the arrays of its error metric.

    addresses: of these arrays for each KV head, int64 (K, fields of `BlockAddresses`); 0 in other fields. arrays:
    name → array, referenced here to keep them alive.
    """

    kernel: Kernel[EncodeArguments]
    addresses: np.ndarray
    arrays: dict[str, np.ndarray]


def encoder(tiles: Tiles, format: CacheFormat, side: int) -> BlockEncoder | str:
    """The encoder of keys (side 0) or values (1) into tiles, or the reason why NumPy must encode them."""
    codec, metric = side_of(format, side)
    if isinstance(kernel := tiles.encoder(format, side), str):
        return kernel
    arrays = {} if metric is None or codec.rounding is None else _arrays(metric, codec.rounding.width)
    addresses = np.zeros((format.kv_heads, len(BlockAddresses._fields)), np.int64)
    for name, array in arrays.items():
        addresses[:, BlockAddresses._fields.index(name)] = by_head(array, format.kv_heads)
    return BlockEncoder(kernel, addresses, arrays)


def by_head(array: np.ndarray, heads: int) -> np.ndarray:
    """Addresses (K,) int64 of each head's part of array (K or 1, …), which must be contiguous."""
    assert array[0].flags.c_contiguous
    step = array.strides[0] if len(array) == heads else 0
    return address(array) + np.arange(heads, dtype=np.int64) * step


def _arrays(metric: Metric, width: int) -> dict[str, np.ndarray]:
    matrix, costs = residue_costs(metric, width)
    arrays = {"feedback": metric.feedback, "matrix": matrix, "costs": costs}
    return arrays if metric.tilt_mean is None else {**arrays, "mean_query": metric.tilt_mean}


_TILES = "tiles"


@dataclass
class TileCache(LayerCache):
    """The stored K/V of one layer, with quantized blocks in tiles, which kernels read.

    k, v: {"tiles": uint8 (K, quantized blocks, bytes of a tile)}; v is empty, and value_tiles None, if values are keys.
    encoders: for keys and for values the encoder, or the reason why NumPy encodes them.
    """

    key_tiles: KeyTiles
    value_tiles: ValueTiles | None
    encoders: tuple[BlockEncoder | str, ...]

    stored_as: ClassVar[str] = transfer.TILES

    def read(self, blocks: np.ndarray) -> Sides:
        k, v, mean = self.take(blocks)
        values = {} if self.value_tiles is None else self.value_tiles.unpack(v[_TILES])
        return Sides(self.key_tiles.unpack(k[_TILES]), values, mean)

    def write_side(self, blocks: Sequence[int], side: int, fields: Fields, mean: Fields) -> None:
        """Overwrite the keys (side 0) or the values (1) of quantized blocks. mean: the block means, of keys only."""
        tiles = self.value_tiles if side else self.key_tiles
        assert tiles is not None
        self.memory[side][:, blocks] = tiles.pack(fields)
        for name, x in mean.items():
            self.mean[name][:, blocks] = x

    @property
    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """The tiles of keys and of values, which may be the same: uint8 (K, quantized blocks, bytes of a tile) each."""
        return self.k[_TILES], self.v.get(_TILES, self.k[_TILES])

    @cached_property
    def block_addresses(self) -> dict[int, tuple[BlockEncoder, np.ndarray, np.ndarray]]:
        """For each side that kernels encode: its encoder, the `BlockAddresses` of block 0, without x, int64 (K, 1, its
        fields), and what each next block adds to it, int64 (its fields)."""
        encoders_by_side = {}
        for side, side_encoder in enumerate(self.encoders):
            if isinstance(side_encoder, BlockEncoder):
                first, steps = side_encoder.addresses[:, None].copy(), np.zeros(len(BlockAddresses._fields), np.int64)
                for name, array in {"tiles": self.memory[side], **({} if side else self.mean)}.items():
                    field, heads = BlockAddresses._fields.index(name), np.arange(len(array), dtype=np.int64)
                    first[:, 0, field] = array.ctypes.data + heads * array.strides[0]
                    steps[field] = array.strides[1]
                encoders_by_side[side] = side_encoder, first, steps
        return encoders_by_side

    @cached_property
    def decoding(self) -> tuple[Kernel[DecodeArguments], DecodeArguments]:
        """The kernel that decodes blocks, and its arguments without the blocks and what they are decoded to."""
        return decode(self._decoding_spec), self._decoding_arguments

    def matrix_decoding(self, matrices: MatrixFormat) -> tuple[Kernel[DecodeArguments], DecodeArguments] | None:
        """The same of the kernel that decodes blocks to matrices of a format; None if there is none."""
        if self.format.block_size % KEYS:
            return None
        kernel = decode(self._decoding_spec, matrices)
        return (kernel, self._decoding_arguments) if kernel.scratch <= SCRATCH else None

    @cached_property
    def _decoding_spec(self) -> DecodingSpec:
        format = self.format
        return DecodingSpec(self.key_tiles, self.value_tiles, format.mean_bits, format.block_size, format.head_dim)

    @cached_property
    def _decoding_arguments(self) -> DecodeArguments:
        keys, values = self.memory
        read = {name: x.ctypes.data for name, x in {"keys": keys, "values": values, **self.mean}.items()}
        blank = dict.fromkeys(DecodeArguments._fields, None)
        return DecodeArguments(**{**blank, **read, "blocks": keys.shape[1]})

    def one_block_cache(self) -> TileCache:
        """A cache with the same format and slots, and memory of its own for one quantized block."""
        k, v, mean = stored_blocks(self.format, 1, transfer.TILES)
        return replace(self, k=k, v=v, mean=mean)


class CacheOps(NumpyOps):
    """The ops that size and allocate caches, and say what NumPy computes of them."""

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        return transfer.nbytes(format, transfer.TILES), super().cache_bytes(format)[1]

    def cache(
        self, format: CacheFormat, quantized: int, full: int, earlier_caches: Sequence[LayerCache] = ()
    ) -> LayerCache:
        """A `TileCache` where kernels can attend over it; else NumPy's cache, whose layer the ops leave to NumPy."""
        both = tiles(format)
        if isinstance(both, str):
            return super().cache(format, quantized, full, earlier_caches)
        encoders = tuple(encoder(one, format, side) for side, one in enumerate(both))
        values = both[1] if len(both) > 1 else None
        memory = *stored_blocks(format, quantized, transfer.TILES), *full_slots(format, full)
        return TileCache(format, *memory, both[0], values, encoders, number=len(earlier_caches))

    def numpy_fallbacks(self, cache: LayerCache) -> dict[str, str]:
        if isinstance(cache, TileCache):
            sides = zip(("keys", "values"), cache.encoders, strict=False)
            return {f"the encoding of {side}": why for side, why in sides if isinstance(why, str)}
        return {"attention and encoding": str(tiles(cache.format))}
