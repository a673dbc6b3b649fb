"""Encoding of blocks with kernels, of several layers at once, and in NumPy for codecs without a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polarlm.engine.backends.kv import FilledBlocks, KVLocation
from polarlm.engine.backends.native.cache import TileCache
from polarlm.engine.backends.native.codecs import EncodedTiles
from polarlm.engine.backends.native.kernels.encode import encode
from polarlm.engine.backends.native.kernels.encode.formats import by_rounding
from polarlm.engine.backends.native.kernels.encode.unit import (
    LANES,
    ROW_PAD,
    Block,
    EncodeArguments,
)
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.numpy.attention import Fields, LayerCache
from polarlm.engine.backends.numpy.encoding import alike, encode_side, store_fields
from polarlm.engine.codecs import NotFinite
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.quantization.encode import decode_centred, fill_up
from polarlm.engine.quantization.metric import Metric


class EncodingOps:
    """The ops that encode blocks."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._encode_in_numpy = launch.unrecorded(self._encode_by_fields, "encoding")
        self._prepared: dict[int, tuple[Metric, dict[str, np.ndarray], np.ndarray]] = {}  # by the id of the metric

    def encode_blocks(self, filled: Sequence[FilledBlocks]) -> None:
        for layers, blocks, sources in alike(filled):
            kernels = [_kernel_into_tiles(layers[0], side) for side in (0, 1)]
            if any(kernel is None or not self._launch.has(kernel) for kernel in kernels):
                self._encode_in_numpy(layers, blocks, sources)
                continue
            for side, kernel in enumerate(kernels):
                assert kernel is not None
                fields = [{**layer.v} if side else {**layer.k, **layer.mean} for layer in layers]
                places = {
                    name: np.concatenate([_by_block(own[name])[:, blocks] for own in fields]) for name in fields[0]
                }
                self._run(kernel, layers, sources, side, places)

    def _encode_by_fields(
        self, layers: Sequence[LayerCache], blocks: Sequence[int], sources: Sequence[KVLocation]
    ) -> None:
        """Encode by kernels where there are any, and write the fields in NumPy."""
        (k, mean), (v, _) = (self._to_fields(layers, sources, side) for side in (0, 1))
        store_fields(layers, blocks, k, mean, v)

    def round_trip(self, cache: LayerCache, place: KVLocation, tokens: int) -> None:
        format, full = cache.format, cache.full(place)
        with np.errstate(invalid="ignore", over="ignore"):  # kernels look for what is not finite
            blocks = [fill_up(side[:, :tokens].astype(np.float32), format.block_size) for side in full]
        k, v = (
            decode_centred(codec, *self._to_fields([cache], [KVLocation(blocks, 0)], side))[:, 0, :tokens]
            for side, codec in enumerate((format.codec_k, format.codec_v))
        )
        cache.store(place, (k, v))

    def _to_fields(
        self, layers: Sequence[LayerCache], sources: Sequence[KVLocation], side: int
    ) -> tuple[Fields, Fields]:
        """As `encode_side`."""
        format = layers[0].format
        codec, encoding = (format.codec_k, format.codec_v)[side], by_rounding(format, side)
        if encoding is None or not self._launch.has(encode(encoding)):
            return encode_side(layers, sources, side)
        dim, lead = format.head_dim, (len(layers) * format.kv_heads, len(sources))
        shape = *lead, format.block_size, dim // encoding.width
        codes, norms = np.empty(shape, np.uint16 if encoding.bits > 8 else np.uint8), np.empty(shape[:3], np.float32)
        fields = mean_fields(encoding.mean_bits, dim) if encoding.mean_bits else {}
        mean = {name: np.empty((*lead, *size), dtype) for name, (size, dtype) in fields.items()}
        results = {"codes": codes, "norms": norms, **mean}
        self._run(encode(encoding), layers, sources, side, {name: _by_block(x) for name, x in results.items()})
        assert codec.rounding is not None
        return codec.rounding.assemble(codes, norms), mean

    def _run(
        self,
        kernel: Kernel[EncodeArguments],
        layers: Sequence[LayerCache],
        sources: Sequence[KVLocation],
        side: int,
        results: Mapping[str, np.ndarray],
    ) -> None:
        """Encode all blocks. results: for each field of a result its addresses, (heads of all layers, B) int64."""
        format = layers[0].format
        addresses = np.zeros((len(layers) * format.kv_heads, len(sources), len(Block._fields)), np.int64)
        for name, places in results.items():
            addresses[..., Block._fields.index(name)] = places
        addresses[..., Block._fields.index("x")] = np.concatenate([_sources(layer, sources, side) for layer in layers])
        metrics = [(layer.format.metric_k, layer.format.metric_v)[side] for layer in layers]
        arrays = [self._metric_addresses(metric) for metric in metrics if metric is not None]
        if arrays:
            addresses += np.concatenate(arrays)[:, None]
        damaged = np.zeros(addresses.shape[:2], np.uint8)
        is_half = layers[0].full(sources[0])[side].dtype == np.float16
        arguments = EncodeArguments(blocks=addresses, damaged=damaged, dim=format.head_dim, is_half=is_half)
        self._launch(kernel, damaged.size, arguments)
        if damaged.any():
            raise NotFinite((format.codec_k, format.codec_v)[side].name)

    def _metric_addresses(self, metric: Metric) -> np.ndarray:
        """The addresses of a metric's arrays for each KV head, 0 for other fields of `Block`: int64 (K, fields)."""
        if id(metric) not in self._prepared:
            arrays = {"feedback": metric.feedback, "matrix": metric.matrix}
            if metric.tilt_mean is not None:
                arrays["mean_query"] = metric.tilt_mean
            if metric.token_feedback is not None:
                width = metric.feedback.shape[1] // metric.weights.shape[1]
                along = diagonals_of_tokens(metric.token_feedback)
                arrays |= {"feedback": diagonals(metric.feedback, width), "along": along}
            heads = len(metric.matrix)
            addresses = np.zeros((heads, len(Block._fields)), np.int64)
            for name, array in arrays.items():
                addresses[:, Block._fields.index(name)] = _by_head(array, heads)
            self._prepared[id(metric)] = metric, arrays, addresses
        return self._prepared[id(metric)][2]


def _kernel_into_tiles(cache: LayerCache, side: int) -> Kernel[EncodeArguments] | None:
    """The kernel that encodes keys (side 0) or values (1) into the cache's tiles; None if there is none."""
    if not isinstance(cache, TileCache):
        return None
    tiles = (cache.key_tiles, cache.value_tiles)[side]
    return tiles.encoder(cache.format, side) if isinstance(tiles, EncodedTiles) else None


def _by_head(array: np.ndarray, heads: int) -> np.ndarray:
    """array (K or 1, …) → addresses along its first axis, (K,) int64."""
    assert array[0].flags.c_contiguous
    step = array.strides[0] if len(array) == heads else 0
    return array.ctypes.data + np.arange(heads, dtype=np.int64) * step


def _by_block(array: np.ndarray) -> np.ndarray:
    """array (K, B, …) → the address of each block, (K, B) int64."""
    return _by_head(array, len(array))[:, None] + np.arange(array.shape[1]) * array.strides[1]


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
        diagonal = feedback[:, :, 0].diagonal(-lag, axis1=1, axis2=2)  # of tokens from `lag` on
        out[:, lag, ROW_PAD : ROW_PAD + size - lag] = diagonal[:, ::-1]
    return out


def _sources(layer: LayerCache, sources: Sequence[KVLocation], side: int) -> np.ndarray:
    """Addresses of the blocks at `sources`: (K, B) int64."""
    numbers = np.array([source.block for source in sources])
    if (buffer := sources[0].buffer) is not None:
        heads, block = buffer[side], layer.format.block_size * buffer[side].strides[1]
        return _by_head(heads, len(heads))[:, None] + numbers * block
    full = (layer.full_k, layer.full_v)[side]
    return _by_head(full, len(full))[numbers] + np.arange(full.shape[1])[:, None] * full.strides[1]
