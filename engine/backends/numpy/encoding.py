"""Blocks of K/V into codes in NumPy, those of several layers at once.

A block of one layer is too small to hide what NumPy takes for a call: a step that fills a block encodes it for as many
layers together as store their K/V alike. Heads of layers stand one behind the other then, as heads of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from engine.backends.numpy.attention import Buffer, Fields, LayerCache
from engine.backends.ops import CacheFormat, Place
from engine.codecs import Codec
from engine.quantization.conditioning import centre, read_mean
from engine.quantization.encode import encode_with_metric
from engine.quantization.metric import Metric, join_layers

_VALUES = 1 << 19  # of all layers that are encoded together


def alike(caches: Sequence[LayerCache], blocks: int) -> Iterator[list[LayerCache]]:
    """Layers next to each other whose blocks, so many of each, can be encoded together."""

    def kind(cache: LayerCache) -> tuple[object, ...]:
        format = cache.format
        own = id(cache) if format.codec_k.per_layer or format.codec_v.per_layer else None
        return own, format.codec_k, format.codec_v, format.mean_bits, format.metric_k is None, format.metric_v is None

    for _, group in itertools.groupby(caches, kind):
        layers = list(group)
        format = layers[0].format
        size = max(1, _VALUES // (blocks * format.kv_heads * format.block_size * format.head_dim))
        yield from (layers[first : first + size] for first in range(0, len(layers), size))


def encode_side(layers: Sequence[LayerCache], sources: Sequence[Place], side: int) -> tuple[Fields, Fields]:
    """The keys (side 0) or values (1) at `sources` in all of `layers` → what `encode` gives, heads of all layers."""
    format = layers[0].format
    x = np.concatenate([layer.complete(sources)[side] for layer in layers])
    if side == 0:
        return encode(format.codec_k, x, join_layers([layer.format.metric_k for layer in layers]), format.mean_bits)
    return encode(format.codec_v, x, join_layers([layer.format.metric_v for layer in layers]))


def encode(codec: Codec, x: np.ndarray, metric: Metric | None, mean_bits: int = 0) -> tuple[Fields, Fields]:
    """x (K, B, N, D) → the codec's fields, and those of the means (none where they are not taken out)."""
    mean: Fields = {}
    if mean_bits:
        x, mean = centre(x, mean_bits)
    return encode_with_metric(codec, x, metric), mean


def as_codes(format: CacheFormat, k: np.ndarray, v: np.ndarray) -> Buffer:
    """k, v (K, S ≤ N, D) as they read back from one encoded block. A part of a block is filled up with its mean."""
    count, block_size = k.shape[1], format.block_size

    def fill(x: np.ndarray) -> np.ndarray:
        mean = np.broadcast_to(x.mean(axis=1, keepdims=True), (x.shape[0], block_size - count, x.shape[2]))
        return np.concatenate([x, mean], axis=1)[:, None]

    quantized_k, mean = encode(format.codec_k, fill(k), format.metric_k, format.mean_bits)
    quantized_v, _ = encode(format.codec_v, fill(v), format.metric_v)
    k, v = format.codec_k.decode(quantized_k)[:, 0], format.codec_v.decode(quantized_v)[:, 0]
    if mean:
        k = k + read_mean(mean)
    return k[:, :count], v[:, :count]
