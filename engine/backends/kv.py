"""What ops are told about K/V: formats of caches, locations of full-precision blocks, and spans of sequences.

Letters as in `engine.backends.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.quantization.metric import Metric

Cache = Any  # the K/V of one layer
Buffer = Any  # a prompt's full-precision K/V of one layer
Spans = Any  # a list of `SpanView`
PreparedTransform = Any  # a `HeadTransform` on the device

_LEAST_TABLE_WIDTH = 16


@dataclass(frozen=True)
class CacheFormat:
    """How one layer stores its K/V, and the error metrics that its encoder minimises.

    metric_k, metric_v: with None, every value is rounded to the nearest code.
    mean_bits: bits per channel of the block mean that is subtracted from keys, 8 or 16; 0 leaves keys uncentred.
    finer: the format of blocks that have more bits and the same transforms, if the cache has both kinds in one memory.
    """

    codec_k: Codec
    codec_v: Codec
    metric_k: Metric | None
    metric_v: Metric | None
    mean_bits: int
    block_size: int
    kv_heads: int
    head_dim: int
    finer: CacheFormat | None = None


class KVLocation(NamedTuple):
    """The location of N tokens in full precision: a block of `buffer`, or a slot of the layer's cache."""

    buffer: Buffer | None  # None: a slot
    block: int  # index of the block in the buffer, or of the slot


class FilledBlocks(NamedTuple):
    """Complete blocks to encode: in each of `caches`, the N tokens at sources[i] become quantized block blocks[i]."""

    caches: Sequence[Cache]
    blocks: Sequence[int]
    sources: Sequence[KVLocation]  # either full-precision slots, or consecutive blocks in the buffer of one cache


@dataclass(frozen=True)
class HeadTransform:
    """The transform of one layer's heads into the stored space, and back for the result of attention; NumPy float32.

    kv_heads: K. scale (H + 2K, D): multiplies queries and keys after RoPE, and values. key_rotation (D, D): applied to
    queries and keys as x @ rotation; value_rotation (D, D): to values. scale_back (H,): multiplies the attention result
    of each query head, before the inverse of value_rotation. value_eps: epsilon of an RMS norm of each value, without
    weights, before its scale. None means no such factor or norm.
    """

    kv_heads: int
    scale: np.ndarray | None = None
    key_rotation: np.ndarray | None = None
    value_rotation: np.ndarray | None = None
    scale_back: np.ndarray | None = None
    value_eps: float | None = None


@dataclass(frozen=True)
class SpanView:
    """One sequence's new rows, for the layers with the same window: where their K/V go, and what they attend to.

    Positions count tokens. The sequence is [sink | quantized blocks | current]: `current` holds the earlier tokens of
    the current block and all new ones in full precision, in consecutive blocks of a prompt's buffer, or in
    full-precision slots in a step.
    """

    rows: slice  # rows of q, k, v that belong to this sequence, in order of position
    position: int  # position of the first of these rows
    current: KVLocation  # first block of `current`: block 0 of a buffer, or the slot of a step's current block
    current_start: int  # position of its first token
    sink: int | None  # full-precision slot of the sink block, the first; None before it is complete
    table: Sequence[int]  # block table: ids of the quantized blocks
    table_start: int  # position of the first token of table[0]
    following: Sequence[int] = ()  # slots of the blocks after `current` that a step's rows extend into
    # Ids of the blocks with more bits, in a cache that has both kinds. Then there is no window, and `table` and `finer`
    # have the sequence's blocks in any order: every row sees all of them.
    finer: Sequence[int] | None = None


def table_width(blocks: int) -> int:
    """The width of a block table on the device for `blocks` block ids: a power of two, since every width needs its own
    recording."""
    return max(_LEAST_TABLE_WIDTH, 1 << max(0, blocks - 1).bit_length())
