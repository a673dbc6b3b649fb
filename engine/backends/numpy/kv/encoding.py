"""Encoding of blocks in NumPy, for several layers at once.

Encoding one block of one layer costs less than the overhead of NumPy's calls, so a block that a step fills is encoded
for all layers of the same format together, with their KV heads concatenated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from polarlm.engine.backends.kv import FilledBlocks, KVLocation
from polarlm.engine.backends.numpy.kv.cache import Fields, LayerCache
from polarlm.engine.quantization.encode import encode_centred
from polarlm.engine.quantization.metric import join_layers

_VALUES = 1 << 19  # most values that are encoded together


def encodable_runs(groups: Sequence[FilledBlocks]) -> Iterator[FilledBlocks]:
    """Yields `groups` in parts: runs of consecutive layers whose blocks can be encoded together."""

    def kind(cache: LayerCache) -> tuple[object, ...]:
        format = cache.format
        return format.codec_k, format.codec_v, format.mean_bits, format.metric_k is None, format.metric_v is None

    for caches, blocks, sources in groups:
        for _, group in itertools.groupby(caches, kind):
            layers = list(group)
            format = layers[0].format
            size = max(1, _VALUES // (len(blocks) * format.kv_heads * format.block_size * format.head_dim))
            for first in range(0, len(layers), size):
                yield FilledBlocks(layers[first : first + size], blocks, sources)


@np.errstate(invalid="ignore", over="ignore")  # codecs check for numbers that are not finite
def encode_side(layers: Sequence[LayerCache], sources: Sequence[KVLocation], side: int) -> tuple[Fields, Fields]:
    """Encode keys (side 0) or values (1) at `sources` in all layers → fields of codes, fields of block means.

    The fields are (L·K, B, …), with the KV heads of L layers concatenated. Raises NotFinite.
    """
    format = layers[0].format
    x = np.concatenate([layer.complete(sources)[side] for layer in layers])
    if side == 0:
        metric = join_layers([layer.format.metric_k for layer in layers])
        return encode_centred(format.codec_k, x, metric, format.mean_bits)
    if format.codec_v is None:
        return {}, {}
    return encode_centred(format.codec_v, x, join_layers([layer.format.metric_v for layer in layers]))
