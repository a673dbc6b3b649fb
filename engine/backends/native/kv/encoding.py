"""Encoding of blocks with kernels, for several layers in one launch, and what a kernel needs to encode a layer's
side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, KVLocation
from polarlm.engine.backends.native.codecs import EncodedTiles, Tiles
from polarlm.engine.backends.native.kernels.encode.paths import path_tables
from polarlm.engine.backends.native.kernels.encode.unit import LANES, ROW_PAD, TABLES, Block, EncodeArguments
from polarlm.engine.backends.native.kv.cache import TileCache
from polarlm.engine.backends.native.launch import KernelOps
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.numpy.kv.encoding import encodable_runs, encode_side
from polarlm.engine.codecs import NotFinite
from polarlm.engine.codecs.trellis import TrellisTable
from polarlm.engine.jit.lang import Kernel
from polarlm.engine.jit.run.workers import SCRATCH
from polarlm.engine.quantization.encode import decode_centred, fill_up
from polarlm.engine.quantization.metric import Metric


@dataclass(frozen=True, eq=False)
class Encoder:
    """A kernel and the arrays of its error metric.

    addresses: of these arrays for each KV head, int64 (K, fields of `Block`); 0 in other fields. arrays: name → array,
    referenced here to keep them alive.
    """

    kernel: Kernel[EncodeArguments]
    addresses: np.ndarray
    arrays: dict[str, np.ndarray]


def encoder(tiles: Tiles, format: CacheFormat, side: int) -> Encoder | str:
    """The encoder of keys (side 0) or values (1) into tiles, or the reason why NumPy must encode them."""
    codec, metric = ((format.codec_k, format.metric_k), (format.codec_v, format.metric_v))[side]
    if not isinstance(tiles, EncodedTiles):
        return f"no kernel encodes {codec.name}"
    if (kernel := tiles.encoder(format, side)) is None:
        if codec.rounding is not None and not isinstance(codec.rounding, TABLES):
            return f"no kernel rounds to the table of {codec.name}"
        return (
            f"{SCRATCH >> 10} KiB of scratch memory are too few to encode {format.block_size} tokens of "
            f"{format.head_dim} channels as {codec.name}; a smaller block_size needs less"
        )
    arrays = {} if metric is None else _arrays(metric)
    if isinstance(codec.rounding, TrellisTable):
        arrays["paths"] = path_tables(codec.rounding.bits).content[None]
    addresses = np.zeros((format.kv_heads, len(Block._fields)), np.int64)
    for name, array in arrays.items():
        addresses[:, Block._fields.index(name)] = by_head(array, format.kv_heads)
    return Encoder(kernel, addresses, arrays)


def by_head(array: np.ndarray, heads: int) -> np.ndarray:
    """Addresses (K,) int64 of each head's part of array (K or 1, …), which must be contiguous."""
    assert array[0].flags.c_contiguous
    step = array.strides[0] if len(array) == heads else 0
    return array.ctypes.data + np.arange(heads, dtype=np.int64) * step


def _arrays(metric: Metric) -> dict[str, np.ndarray]:
    arrays = {"feedback": metric.feedback, "matrix": metric.matrix, "weights": metric.weights}
    if metric.tilt_mean is not None:
        arrays["mean_query"] = metric.tilt_mean
    if (token_feedback := metric.token_feedback) is not None and token_feedback.shape[
        2
    ] > 1:  # rounds of several tokens
        arrays["token_feedback"] = np.ascontiguousarray(token_feedback.swapaxes(2, 3))
    elif token_feedback is not None:
        width = metric.feedback.shape[1] // metric.weights.shape[1]
        arrays["feedback"] = diagonals(metric.feedback, width)
        arrays["token_feedback"] = diagonals_of_tokens(token_feedback)
    return arrays


def diagonals(feedback: np.ndarray, width: int) -> np.ndarray:
    """feedback (K, D, D) → (K, P + 1, width, width, P rounded up to 16) float32, as `Encoding` describes it."""
    heads, dim, _ = feedback.shape
    pairs = dim // width
    blocks = feedback.reshape(heads, pairs, width, pairs, width)
    out = np.zeros((heads, pairs + 1, width, width, -(-pairs // LANES) * LANES), np.float32)
    for lag in range(1, pairs):
        rows = np.arange(lag, pairs)
        out[:, lag, :, :, lag:pairs] = blocks[:, rows, :, rows - lag].transpose(1, 2, 3, 0)
    return out


def diagonals_of_tokens(feedback: np.ndarray) -> np.ndarray:
    """feedback (K or 1, N, 1, N) → (K or 1, N + 1, N + 32) float32, as `Encoding` describes it."""
    size = feedback.shape[-1]
    out = np.zeros((len(feedback), size + 1, size + 2 * ROW_PAD), np.float32)
    for lag in range(1, size):
        diagonal = feedback[:, :, 0].diagonal(-lag, axis1=1, axis2=2)  # for tokens lag, …, N − 1
        out[:, lag, ROW_PAD : ROW_PAD + size - lag] = diagonal[:, ::-1]
    return out


_X, _IS_HALF = Block._fields.index("x"), EncodeArguments._fields.index("is_half")


class _Launch(NamedTuple):
    """What blocks have in common that are encoded in one launch."""

    kernel: Kernel[EncodeArguments]
    dim: int
    is_half: bool
    codec: str


class EncodingOps(KernelOps):
    """The ops that encode blocks. Layers whose cache is not a `TileCache` are encoded by NumPy."""

    def encode_blocks(self, groups: Sequence[FilledBlocks]) -> None:
        if len(groups) == 1 and self._encode_one(*groups[0]):
            return
        launches: dict[_Launch, list[np.ndarray]] = {}
        for layers, blocks, sources in encodable_runs(groups):
            tiled = [layer for layer in layers if isinstance(layer, TileCache)]  # all of them, or none
            if not tiled:
                self._launch.run_numpy(super().encode_blocks, [FilledBlocks(layers, blocks, sources)])
                continue
            targets = np.array(blocks, np.int64)[:, None]
            codecs, dim = (layers[0].format.codec_k.name, layers[0].format.codec_v.name), layers[0].format.head_dim
            for layer in tiled:
                for side, (encoder, first, steps) in layer.block_addresses.items():
                    x, is_half = _sources(layer, sources, side)
                    addresses = first + steps * targets
                    addresses[..., _X] = x
                    launch = _Launch(encoder.kernel, dim, is_half, codecs[side])
                    launches.setdefault(launch, []).append(addresses.reshape(-1, addresses.shape[-1]))
            for side in {0, 1} - tiled[0].block_addresses.keys():
                self._launch.run_numpy(_encode_side, tiled, blocks, sources, side)
        self._encode({launch: np.concatenate(parts) for launch, parts in launches.items()})

    def _encode_one(self, layers: Sequence[LayerCache], blocks: Sequence[int], sources: Sequence[KVLocation]) -> bool:
        """Encode a block of a layer, if it is only one, and kernels encode both sides; return whether it is so. Steps
        do that again and again: launches that are prepared take less Python."""
        if len(layers) != 1 or len(blocks) != 1 or not isinstance(layer := layers[0], TileCache):
            return False
        if len(encoders_by_side := layer.block_addresses) < 2:
            return False
        if layer.one_block_encoding is None:
            heads, dim, launches = layer.format.kv_heads, layer.format.head_dim, []
            for encoder, first, _ in encoders_by_side.values():
                blank = EncodeArguments(first[:, 0].copy(), np.zeros(heads, np.uint8), dim, is_half=False)
                launches.append((encoder.kernel, heads, blank))
            layer.one_block_encoding = self._launch.prepare(launches)
        prepared, arrays = layer.one_block_encoding.launches, layer.one_block_encoding.arrays
        for side, (_, first, steps) in encoders_by_side.items():
            x, is_half = _sources(layer, sources, side)
            addresses = arrays[2 * side]
            np.add(first[:, 0], steps * blocks[0], out=addresses)
            addresses[:, _X] = x[:, 0]
            _, arguments, *_ = prepared[side]
            arguments[_IS_HALF] = is_half
        self._launch.run(layer.one_block_encoding)
        for damaged, codec in zip(arrays[1::2], (layer.format.codec_k, layer.format.codec_v), strict=True):
            if damaged.any():
                raise NotFinite(codec.name)
        return True

    def round_trip(self, cache: LayerCache, place: KVLocation, tokens: int) -> None:
        if not isinstance(cache, TileCache):
            super().round_trip(cache, place, tokens)
            return
        format, one = cache.format, cache.one_block_cache()
        with np.errstate(invalid="ignore", over="ignore"):  # the kernels report numbers that are not finite
            blocks = [fill_up(x[:, :tokens].astype(np.float32), format.block_size) for x in cache.full(place)]
        self.encode_blocks([FilledBlocks([one], [0], [KVLocation(blocks, 0)])])
        k, v, mean = one.read(np.array([0]))
        read_back = decode_centred(format.codec_k, k, mean), decode_centred(format.codec_v, v, {})
        cache.store(place, (read_back[0][:, 0, :tokens], read_back[1][:, 0, :tokens]))

    def _encode(self, launches: dict[_Launch, np.ndarray]) -> None:
        """Encode the keys or the values of blocks of KV heads, of all layers, at the same time. Raises NotFinite."""
        damaged = {launch: np.zeros(len(addresses), np.uint8) for launch, addresses in launches.items()}
        prepared = self._launch.prepare(
            (
                launch.kernel,
                len(addresses),
                EncodeArguments(addresses, damaged[launch], dim=launch.dim, is_half=launch.is_half),
            )
            for launch, addresses in launches.items()
        )
        self._launch.run(prepared)
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


def _sources(layer: LayerCache, sources: Sequence[KVLocation], side: int) -> tuple[np.ndarray, bool]:
    """Addresses (K, B) int64 of the full-precision blocks at `sources`, and whether they are float16."""
    numbers = np.array([source.block for source in sources])
    if (buffer := sources[0].buffer) is not None:
        x, block = buffer[side], layer.format.block_size * buffer[side].strides[1]
        return by_head(x, len(x))[:, None] + numbers * block, x.dtype == np.float16
    full = (layer.full_k, layer.full_v)[side]
    return by_head(full, len(full))[numbers] + np.arange(full.shape[1])[:, None] * full.strides[1], True
