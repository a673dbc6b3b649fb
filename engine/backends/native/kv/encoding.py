"""Encoding of blocks with kernels, for several layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import FilledBlocks, KVLocation
from polarlm.engine.backends.native.kernels.encode.unit import BlockAddresses, EncodeArguments
from polarlm.engine.backends.native.kv.cache import TileCache, by_head
from polarlm.engine.backends.native.launch import KernelOps
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.numpy.kv.encoding import encodable_runs, encode_side
from polarlm.engine.codecs import NotFinite
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.quantization.encode import decode_centred, fill_up

_X = BlockAddresses._fields.index("x")


class _EncodeLaunch(NamedTuple):
    """What blocks have in common that are encoded in one launch."""

    kernel: Kernel[EncodeArguments]
    dim: int
    is_half: bool
    codec: str


class EncodingOps(KernelOps):
    """The ops that encode blocks. Layers whose cache is not a `TileCache` are encoded by NumPy."""

    def encode_blocks(self, groups: Sequence[FilledBlocks]) -> None:
        launches: dict[_EncodeLaunch, list[np.ndarray]] = {}
        for layers, blocks, sources in encodable_runs(groups):
            tiled = [layer for layer in layers if isinstance(layer, TileCache)]  # all of them, or none
            if not tiled:
                self._launch.run_numpy(super().encode_blocks, [FilledBlocks(layers, blocks, sources)])
                continue
            targets = np.array(blocks, np.int64)[:, None]
            codecs, dim = _codec_names(layers[0]), layers[0].format.head_dim
            for layer in tiled:
                for side, (encoder, first, steps) in layer.block_addresses.items():
                    x, is_half = _sources(layer, sources, side)
                    addresses = first + steps * targets
                    addresses[..., _X] = x
                    launch = _EncodeLaunch(encoder.kernel, dim, is_half, codecs[side])
                    launches.setdefault(launch, []).append(addresses.reshape(-1, addresses.shape[-1]))
            for side in set(range(len(codecs))) - tiled[0].block_addresses.keys():
                self._launch.run_numpy(_encode_side, tiled, blocks, sources, side)
        self._encode({launch: np.concatenate(parts) for launch, parts in launches.items()})

    def round_trip(self, cache: LayerCache, place: KVLocation, tokens: int) -> None:
        if not isinstance(cache, TileCache):
            super().round_trip(cache, place, tokens)
            return
        format, one = cache.format, cache.one_block_cache()
        with np.errstate(invalid="ignore", over="ignore"):  # the kernels report numbers that are not finite
            blocks = [fill_up(x[:, :tokens].astype(np.float32), format.block_size) for x in cache.full(place)]
        self.encode_blocks([FilledBlocks([one], [0], [KVLocation(blocks, 0)])])
        k, v, mean = one.read(np.array([0]))
        keys = decode_centred(format.codec_k, k, mean)
        values = keys if format.codec_v is None else decode_centred(format.codec_v, v, {})
        cache.store(place, (keys[:, 0, :tokens], values[:, 0, :tokens]))

    def _encode(self, launches: dict[_EncodeLaunch, np.ndarray]) -> None:
        """Encode the keys or the values of blocks of KV heads, of all layers, at the same time. Raises NotFinite."""
        damaged = {launch: np.zeros(len(addresses), np.uint8) for launch, addresses in launches.items()}
        self._launch.launch_together(
            [
                (launch.kernel, len(blocks), EncodeArguments(blocks, damaged[launch], launch.dim, launch.is_half))
                for launch, blocks in launches.items()
            ]
        )
        for launch, damaged_blocks in damaged.items():
            if damaged_blocks.any():
                raise NotFinite(launch.codec)


def _encode_side(layers: Sequence[TileCache], blocks: Sequence[int], sources: Sequence[KVLocation], side: int) -> None:
    """Encode the keys (side 0) or the values (1) of all layers, and pack them into tiles."""
    fields, mean = encode_side(layers, sources, side)
    heads = layers[0].format.kv_heads
    for number, layer in enumerate(layers):
        part = slice(number * heads, (number + 1) * heads)
        layer.write_side(blocks, side, *({name: x[part] for name, x in arrays.items()} for arrays in (fields, mean)))


def _codec_names(layer: LayerCache) -> list[str]:
    """The codecs of keys and, if they are stored, of values."""
    return [codec.name for codec in (layer.format.codec_k, layer.format.codec_v) if codec is not None]


def _sources(layer: LayerCache, sources: Sequence[KVLocation], side: int) -> tuple[np.ndarray, bool]:
    """Addresses (K, B) int64 of the full-precision blocks at `sources`, and whether they are float16."""
    numbers = np.array([source.block for source in sources])
    if (buffer := sources[0].buffer) is not None:
        x = layer.part_of(buffer)[side]
        block = layer.format.block_size * x.strides[1]
        return by_head(x, len(x))[:, None] + numbers * block, x.dtype == np.float16
    full = (layer.full_k, layer.full_v)[side]
    return by_head(full, len(full))[numbers] + np.arange(full.shape[1])[:, None] * full.strides[1], True
