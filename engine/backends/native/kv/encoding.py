"""Encoding of blocks with kernels, for several layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import FilledBlocks, KVLocation
from polarlm.engine.backends.native.kernels.encode.unit import Block, EncodeArguments
from polarlm.engine.backends.native.kv.cache import TileCache
from polarlm.engine.backends.native.kv.encoders import Encoder, by_head
from polarlm.engine.backends.native.launch import KernelOps
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.numpy.kv.encoding import alike, encode_side
from polarlm.engine.codecs import NotFinite
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.quantization.encode import decode_centred, fill_up


class _Launch(NamedTuple):
    """What blocks have in common that are encoded in one launch."""

    kernel: Kernel[EncodeArguments]
    dim: int
    is_half: bool
    codec: str


class EncodingOps(KernelOps):
    """The ops that encode blocks. Layers whose cache is not a `TileCache` are encoded by NumPy."""

    def encode_blocks(self, filled: Sequence[FilledBlocks]) -> None:
        launches: dict[_Launch, list[np.ndarray]] = {}
        for layers, blocks, sources in alike(filled):
            tiled = [layer for layer in layers if isinstance(layer, TileCache)]  # all of them, or none
            if not tiled:
                self._launch.in_numpy(super().encode_blocks, [FilledBlocks(layers, blocks, sources)])
                continue
            format = tiled[0].format
            for side in (0, 1):
                if isinstance(encoder := tiled[0].encoders[side], Encoder):
                    is_half = tiled[0].full(sources[0])[side].dtype == np.float16
                    codec = (format.codec_k, format.codec_v)[side].name
                    launch = _Launch(encoder.kernel, format.head_dim, is_half, codec)
                    addresses = [_addresses(layer, blocks, sources, side) for layer in tiled]
                    launches.setdefault(launch, []).extend(x.reshape(-1, x.shape[-1]) for x in addresses)
                else:
                    self._launch.in_numpy(_encode_side, tiled, blocks, sources, side)
        self._encode({launch: np.concatenate(parts) for launch, parts in launches.items()})

    def round_trip(self, cache: LayerCache, place: KVLocation, tokens: int) -> None:
        if not isinstance(cache, TileCache):
            super().round_trip(cache, place, tokens)
            return
        format, one = cache.format, cache.of_one_block()
        with np.errstate(invalid="ignore", over="ignore"):  # the kernels report numbers that are not finite
            blocks = [fill_up(x[:, :tokens].astype(np.float32), format.block_size) for x in cache.full(place)]
        self.encode_blocks([FilledBlocks([one], [0], [KVLocation(blocks, 0)])])
        k, v, mean = one.read(np.array([0]))
        read_back = decode_centred(format.codec_k, k, mean), decode_centred(format.codec_v, v, {})
        cache.store(place, (read_back[0][:, 0, :tokens], read_back[1][:, 0, :tokens]))

    def _encode(self, launches: dict[_Launch, np.ndarray]) -> None:
        """Encode the keys or the values of blocks of KV heads, of all layers, at the same time. Raises NotFinite."""
        damaged = {launch: np.zeros(len(addresses), np.uint8) for launch, addresses in launches.items()}
        self._launch.together(
            (
                launch.kernel,
                len(addresses),
                EncodeArguments(addresses, damaged[launch], dim=launch.dim, is_half=launch.is_half),
            )
            for launch, addresses in launches.items()
        )
        for launch, of_blocks in damaged.items():
            if of_blocks.any():
                raise NotFinite(launch.codec)


def _encode_side(layers: Sequence[TileCache], blocks: Sequence[int], sources: Sequence[KVLocation], side: int) -> None:
    """Encode the keys (side 0) or the values (1) of all layers, and pack them into tiles."""
    fields, mean = encode_side(layers, sources, side)
    heads = layers[0].format.kv_heads
    for number, layer in enumerate(layers):
        part = slice(number * heads, (number + 1) * heads)
        layer.write_side(blocks, side, *({name: x[part] for name, x in arrays.items()} for arrays in (fields, mean)))


def _addresses(layer: TileCache, blocks: Sequence[int], sources: Sequence[KVLocation], side: int) -> np.ndarray:
    """The `Block` of each KV head and block, which a kernel reads: int64 (K, B, fields of `Block`)."""
    first, steps = layer.block_addresses[side]
    addresses = first + steps * np.asarray(blocks, np.int64)[:, None]
    addresses[..., Block._fields.index("x")] = _sources(layer, sources, side)
    return addresses


def _sources(layer: LayerCache, sources: Sequence[KVLocation], side: int) -> np.ndarray:
    """Addresses (K, B) int64 of the full-precision blocks at `sources`."""
    numbers = np.array([source.block for source in sources])
    if (buffer := sources[0].buffer) is not None:
        heads, block = buffer[side], layer.format.block_size * buffer[side].strides[1]
        return by_head(heads, len(heads))[:, None] + numbers * block
    full = (layer.full_k, layer.full_v)[side]
    return by_head(full, len(full))[numbers] + np.arange(full.shape[1])[:, None] * full.strides[1]
