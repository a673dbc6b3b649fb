"""The ops on K/V: caches, attention, blocks, and their copies on the host.

Letters and types as in `engine.backends.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from polarlm.engine.backends.kv import (
    Buffer,
    Cache,
    CacheFormat,
    FilledBlocks,
    KVLocation,
    PreparedTransform,
    Spans,
    SpanView,
)
from polarlm.engine.weight_formats import Linear

Array = Any


class KVOps(Protocol):
    """The part of `Ops` that reads and writes K/V."""

    def cache_bytes(self, format: CacheFormat) -> tuple[int, int]:
        """Bytes of a quantized block (not of the finer kind), and of a full-precision slot, all KV heads.

        Raises ValueError for a codec that the backend does not support.
        """

    def cache(self, format: CacheFormat, quantized: int, full: int, beside: Sequence[Cache] = ()) -> Cache:
        """Memory for one layer: `quantized` blocks, `full` slots. beside: caches whose codec tables it may share.

        If the format has a finer one, the cache's attribute `finer` is a cache of that format with the same slots. Its
        blocks are in the same memory, from the beginning on: those of both kinds that are in use must not overlap. A
        block of either kind begins at its id times `code_bytes` of its cache, and `move(target, source)` copies one.
        Slots hold float16: larger magnitudes are clipped to ±65504, NaN stays NaN, and on the CPU infinity becomes NaN.
        """

    def in_numpy(self, cache: Cache) -> Mapping[str, str]:
        """The parts of a layer with this cache that NumPy computes for lack of compiled kernels → why.

        Empty if kernels compute all of it, or if NumPy is the whole backend.
        """

    def buffer(self, format: CacheFormat, rows: int, *, as_slots: bool = False) -> Buffer:
        """Memory for `rows` tokens' K/V of one layer in full precision: float16 on a GPU; on the CPU float32, or
        float16 with `as_slots`."""

    def spans(self, spans: Sequence[SpanView], block_size: int) -> Spans:
        """`spans` as the argument of the ops below: one span of a prompt, or those of a step, in order of their rows.

        block_size: N. The rows of consecutive spans are contiguous.
        """

    def append_kv(self, cache: Cache, spans: Spans, k: Array, v: Array) -> None:
        """Write rows of k, v (T, K, D), from `transform_heads`, into each span's `current` at their positions."""

    def place_kv(
        self,
        qkv: Array,
        rope: tuple[Array, Array],
        transform: PreparedTransform,
        cache: Cache,
        spans: Spans,
        norms: tuple[Array, Array, float] | None = None,
    ) -> Array:
        """`transform_heads`, then `append_kv` of keys and values → the queries (T, H, D).

        CUDA: place_kv in a step; transform_heads and append_kv in a prompt, or where a rotation is dense.
        """

    def attention(
        self,
        q: Array,
        cache: Cache,
        spans: Spans,
        scale: float,
        window: int | None,
        transform: PreparedTransform | None = None,
        then: Linear | None = None,
        *,
        softcap: float | None = None,
        sink_scores: Array | None = None,
    ) -> Array:
        """Causal attention of q (T, H, D), contiguous, from `transform_heads`, over each span's whole sequence
        → (T, H, D).

        scale: multiplies the scores. Query head h reads KV head h // (H // K). With a window, position p sees only
        positions > p − window. transform: its scale_back and inverse value rotation are applied to the result; None
        leaves the result in the space of the stored values. then: as in `linear`. softcap: c, by which scores s
        become c · tanh(s / c) before they are masked. sink_scores (H,): a score of each query head that takes part in
        the softmax of every row, and whose value is 0.
        CUDA: decode_attention in a step, prefill_attention and rotate in a prompt; rotate_dense where the
        rotation is dense.
        """

    def encode_blocks(self, filled: Sequence[FilledBlocks]) -> None:
        """Encode blocks; keys are centred first. CUDA: encode_blocks, once for each pair of codecs among all caches."""

    def decode_blocks(self, cache: Cache, blocks: Sequence[int]) -> Buffer:
        """A buffer, as a prompt has, of what quantized blocks decode to, in order."""

    def copy_full(self, cache: Cache, target: KVLocation, source: KVLocation, tokens: int) -> None:
        """Copy the first `tokens` ≤ N tokens of `source` to `target`."""

    def round_trip(self, cache: Cache, place: KVLocation, tokens: int) -> None:
        """Replace the first `tokens` ≤ N tokens at `place` by what a block of them, padded with their mean, decodes
        to."""

    # -- from the KV store to the host, and back -----------------------------------------------------------------

    def read_blocks(self, cache: Cache, blocks: Sequence[int]) -> dict[str, Any]:
        """The quantized blocks with one or more ids as NumPy arrays, in the representation `stored_as`."""

    def write_blocks(self, cache: Cache, blocks: Sequence[int], arrays: Mapping[str, Any]) -> None:
        """Overwrite the quantized blocks with one or more ids with `arrays`, from `read_blocks` of any backend.

        Raises ValueError if the arrays do not hold that many blocks of this cache's format.
        """

    def read_full(self, cache: Cache, slot: int, tokens: int) -> tuple[Any, Any]:
        """The first `tokens` ≤ N tokens of a full-precision slot: k, v (K, tokens, D) float16, as stored."""

    def write_full(self, cache: Cache, slot: int, k: Any, v: Any) -> None:
        """Write k, v (K, tokens ≤ N, D), float16 or float32, to the first tokens of a full-precision slot.

        Raises ValueError for arrays of another shape or type.
        """
