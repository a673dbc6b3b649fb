"""The ops on K/V, and the types of their arguments: formats of caches, locations of blocks, spans of sequences.

Letters and types as in `engine.backends.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.quantization.metric import Metric
from polarlm.engine.weight_formats import Linear

Array = Any
OwnCache = Any  # a `Cache` of these ops
Buffer = Any  # a prompt's full-precision K/V of one layer, or of each of the layers that are sealed together
Spans = Any  # a list of `SpanView`
PreparedTransform = Any  # a `HeadTransform` on the device
Norm = tuple[Array, float] | None  # weight and epsilon of an RMS norm
Norms = tuple[Array, Array, float] | None  # weights of RMS norms of queries and of keys, and epsilon
Rope = tuple[Array, Array]  # cos and sin


@dataclass(frozen=True)
class CacheFormat:
    """How one layer stores its K/V, and the error metrics that its encoder minimises.

    codec_v: None if values are keys, which are stored once.
    metric_k, metric_v: with None, every value is rounded to the nearest code.
    mean_bits: bits per channel of the block mean that is subtracted from keys, 8 or 16; 0 leaves keys uncentred.
    """

    codec_k: Codec
    codec_v: Codec | None
    metric_k: Metric | None
    metric_v: Metric | None
    mean_bits: int
    block_size: int
    kv_heads: int
    head_dim: int

    @property
    def sides(self) -> str:
        """What is stored of a token: "kv" for a key and a value, "k" for a key alone."""
        return "k" if self.codec_v is None else "kv"


class Cache(Protocol):
    """The K/V of one layer, as `KVOps.cache` returns it: what is known of it outside of its backend."""

    @property
    def format(self) -> CacheFormat:
        """The format that it was made with."""


class KVLocation(NamedTuple):
    """The location of N tokens in full precision: a block of `buffer`, or a slot of the layer's cache."""

    buffer: Buffer | None  # None: a slot
    block: int  # index of the block in the buffer, or of the slot


class FilledBlocks(NamedTuple):
    """Complete blocks to encode: in each of `caches`, the N tokens at sources[i] become quantized block blocks[i]."""

    caches: Sequence[OwnCache]
    blocks: Sequence[int]
    sources: Sequence[KVLocation]  # either full-precision slots, or consecutive blocks in a buffer of these caches


class Move(NamedTuple):
    """Where to copy the first `tokens` ≤ N tokens of `source`."""

    target: KVLocation
    source: KVLocation
    tokens: int


@dataclass(frozen=True)
class HeadTransform:
    """The transform of one layer's heads into the stored space, and back for the result of attention; NumPy float32.

    kv_heads: K. scale (H + 2K, D): multiplies queries and keys after RoPE, and values. key_rotation (D, D): applied to
    queries and keys as x @ rotation; value_rotation (D, D): to values. scale_back (H,): multiplies the attention result
    of each query head, before the inverse of value_rotation; query heads that read one KV head have the same.
    value_eps: epsilon of an RMS norm of each value, without weights, before its scale. None means no such factor or
    norm. values_are_keys: there are H + K heads, and values are the keys as they are stored.
    """

    kv_heads: int
    scale: np.ndarray | None = None
    key_rotation: np.ndarray | None = None
    value_rotation: np.ndarray | None = None
    scale_back: np.ndarray | None = None
    value_eps: float | None = None
    values_are_keys: bool = False


class HeadRule(NamedTuple):
    """What happens to the heads of a layer before they are stored and scored, made once for the layer.

    norms: weights (D,) of an RMS norm of each query and of each key, and eps. transform: norm of values, scale and
    rotation.
    """

    transform: PreparedTransform
    norms: Norms = None


class AttentionRule(NamedTuple):
    """How the scores of attention become weights, and what happens to its results, made once for a layer.

    scale: multiplies the scores. With a window, position p sees only positions > p − window. softcap: c, by which
    scores s become c · tanh(s / c) before they are masked. sink_scores (H,): a score of each query head that takes part
    in the softmax of every row, and whose value is 0. transform: its scale_back and inverse value rotation are applied
    to the results; None leaves these in the space of the stored values. consumer: as in `ops.Fusion`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sink_scores: Array | None = None
    transform: PreparedTransform | None = None
    consumer: Linear | None = None


@dataclass(frozen=True)
class SpanView:
    """One sequence's new rows, for the layers with the same window: where their K/V go, and what they attend to.

    Positions count tokens. The sequence is [sink | quantized blocks | full precision]: the last part holds the newest
    complete blocks, the current one and all new tokens, in consecutive blocks of a prompt's buffer, or in
    full-precision slots in a step.
    """

    rows: slice  # rows of q, k, v that belong to this sequence, in order of position
    position: int  # position of the first of these rows
    current: KVLocation  # the first block in full precision behind the codes
    current_start: int  # position of its first token
    sink: int | None  # full-precision slot of the sink block, the first; None before it is complete
    table: Sequence[int]  # block table: ids of the quantized blocks
    table_start: int  # position of the first token of table[0]
    following: Sequence[int] = ()  # in a step, slots of all blocks after `current`, in order
    sees: int = 0  # position up to which all of these rows see, if that is later than their own


@dataclass(eq=False)
class RecordedSpans:
    """Stands for the spans of a group of layers while batches are recorded, and when they are run again.

    spans: of the batch that runs now, for the ops. begin, seal: prepare a layer's buffers, and keep what it has
    appended to them. layer: the one that is being recorded. pending: what appends its K/V, and arrays, which it takes.
    """

    begin: Callable[[int], None]
    seal: Callable[[int], None]
    spans: Spans = None
    layer: int = 0
    pending: tuple[Callable[..., None], Sequence[Array]] | None = None

    def append_call(self) -> tuple[Callable[..., None], Sequence[Array]]:
        """Return what appends and keeps the layer's K/V, between two parts of a recording, and the arrays that it
        takes."""
        layer, (append, arrays) = self.layer, self.pending or (lambda: None, ())
        self.pending = None

        def run(*arrays: Array) -> None:
            self.begin(layer)
            append(*arrays)
            self.seal(layer)

        return run, arrays


def table_width(blocks: int) -> int:
    """The width of a block table on the device for `blocks` block ids: a power of two, since each width is recorded."""
    return max(16, 1 << max(0, blocks - 1).bit_length())


def layers_together(encoded_at_once: int, kv_heads: Sequence[int], blocks: int) -> int:
    """How many layers of a prompt, or of a batch, are sealed together whose buffer has `blocks` blocks for a layer:
    also those that stay incomplete take memory. kv_heads: K of each layer that has K/V."""
    return min(len(kv_heads), -(-encoded_at_once // (max(kv_heads, default=1) * max(1, blocks))))


class KVOps(Protocol):
    """The part of `Ops` that reads and writes K/V."""

    # Blocks of a KV head that are worth a launch of the encoder: four for each multiprocessor of a GPU, 1 on a CPU.
    encoded_at_once: int

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        """Bytes of a quantized block, and of a full-precision slot, all KV heads.

        Raises ValueError for a codec that the backend does not support.
        """

    def cache(self, format: CacheFormat, quantized: int, full: int, earlier_caches: Sequence[OwnCache] = ()) -> Cache:
        """Memory for one layer: `quantized` blocks, `full` slots. earlier_caches: the caches of the layers before,
        whose codec tables it may share.

        Slots hold float16: larger magnitudes are clipped to ±65504, NaN stays NaN, and infinity becomes NaN on the CPU
        and in `write_full`.
        """

    def numpy_fallbacks(self, cache: OwnCache) -> Mapping[str, str]:
        """The parts of a layer with this cache that NumPy computes for lack of compiled kernels → why.

        Empty if kernels compute all of it, or if NumPy is the whole backend.
        """

    def buffer(self, format: CacheFormat, rows: int, *, as_slots: bool = False, layers: int = 1) -> Buffer:
        """Memory for `rows` tokens' K/V of one layer in full precision: float16 on a GPU; on the CPU float32, or
        float16 with `as_slots`. layers: how many consecutive layers with K/V the memory is for."""

    def spans(self, spans: Sequence[SpanView], block_size: int) -> Spans:
        """`spans` as the argument of the ops below: one span of a prompt, maybe cut at images, or the spans of a step,
        by rows.

        block_size: N. The rows of consecutive spans are contiguous.
        """

    @property
    def next_spans(self) -> Callable[..., Spans] | None:
        """next_spans(last, before, views, positions, block_size): `spans` of a step with one row a sequence. Row i has
        the blocks of row before[i] of `last`, the last one, or is views[i] if it is −1. None: `spans` is cheap."""

    def append_kv(self, cache: OwnCache, spans: Spans, k: Array, v: Array) -> None:
        """Write rows of k, v (T, K, D), from `transform_heads`, into each span's blocks in full precision, at their
        positions."""

    def place_kv(self, qkv: Array, rope: Rope, rule: HeadRule, cache: OwnCache, spans: Spans) -> Array:
        """`transform_heads`, then `append_kv` of keys and values → the queries (T, H, D).

        CUDA: place_kv in a step; transform_heads and append_kv in a prompt, or where a rotation is dense.
        """

    def attention(self, q: Array, cache: OwnCache, spans: Spans, rule: AttentionRule) -> Array:
        """Causal attention of q (T, H, D), contiguous, from `transform_heads`, over each span's whole sequence
        → (T, H, D).

        Query head h reads KV head h // (H // K). Up to a span's `sees` all K/V are there.
        CUDA: decode_attention in a step, prefill_attention and rotate in a prompt; rotate_dense where the
        rotation is dense.
        """

    def encode_blocks(self, groups: Sequence[FilledBlocks]) -> None:
        """Encode blocks; keys are centred first. CUDA: encode_rows and encode_blocks, at most
        once for each pair of codecs among all caches."""

    def copy_full(self, caches: Sequence[OwnCache], moves: Sequence[Move]) -> None:
        """Copy tokens in each of `caches`, whose heads have one shape. All targets are in one buffer, or all are slots;
        so are all sources. What a target has behind the copied tokens stays on a CPU, and becomes 0 on a GPU."""

    def round_trip(self, cache: OwnCache, place: KVLocation, tokens: int) -> None:
        """Replace the first `tokens` ≤ N tokens at `place` by what a block of them, padded with their mean, decodes
        to. What is behind them is as after `copy_full`."""

    # -- from the KV store to the host, and back -----------------------------------------------------------------

    def read_blocks(self, cache: OwnCache, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        """The quantized blocks with one or more ids as NumPy arrays, in the representation `stored_as`."""

    def write_blocks(self, cache: OwnCache, blocks: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrite the quantized blocks with one or more ids with `arrays`, from `read_blocks` of any backend.

        Raises ValueError if the arrays do not hold that many blocks of this cache's format.
        """

    def read_full(self, cache: OwnCache, slot: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `tokens` ≤ N tokens of a full-precision slot: k, v (K, tokens, D) float16, as stored."""

    def write_full(self, cache: OwnCache, slot: int, k: np.ndarray, v: np.ndarray) -> None:
        """Write k, v (K, tokens ≤ N, D), float16 or float32, to the first tokens of a full-precision slot.

        Raises ValueError for arrays of another shape or type.
        """
