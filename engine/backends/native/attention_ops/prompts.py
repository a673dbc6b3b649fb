"""Attention of prompts, whose quantized blocks are decoded first, to float32 or to matrices of 16 bits, and the ops of
encoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np

from polarlm.engine.backends.kv import AttentionRule, HeadRule, KVLocation, Rope, SpanView
from polarlm.engine.backends.native.attention_ops.heads import NO_ROTATION, HeadOps
from polarlm.engine.backends.native.attention_ops.step_table import NO_WINDOW, StepTable
from polarlm.engine.backends.native.kernels.attention import matrices
from polarlm.engine.backends.native.kernels.attention.bfloat_matrices import BFLOAT
from polarlm.engine.backends.native.kernels.attention.matrices import MatrixArguments, MatrixFormat, to_matrices
from polarlm.engine.backends.native.kernels.attention.matrix_prompts import attend_by_matrices, most_queries
from polarlm.engine.backends.native.kernels.attention.matrix_unit import MatrixSegment
from polarlm.engine.backends.native.kernels.attention.prompts import (
    PromptArguments,
    Segment,
    TextArguments,
    attend,
    attend_to_texts,
)
from polarlm.engine.backends.native.kernels.attention.unit import KEYS, MOST_QUERIES, PromptSpec, supports
from polarlm.engine.backends.native.kernels.attention.word_matrices import WORDS
from polarlm.engine.backends.native.kernels.rows import LayerNormArguments, layer_norm_rows
from polarlm.engine.backends.native.kv.cache import TileCache
from polarlm.engine.backends.native.launch import KernelOps, LaunchSpec
from polarlm.engine.backends.numpy.attention import parts_of
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.ops import Texts
from polarlm.engine.errors import KernelError
from polarlm.engine.jit.lang.records import words
from polarlm.engine.jit.run.buffers import MOST

AnySegment: TypeAlias = Segment | MatrixSegment

_LEAST_QUERIES = 48  # units are not halved below this number of queries
_UNITS = 4  # least units per thread, as long as units stay that large
_DECODED = 4096  # most tokens of quantized blocks that are decoded at a time


class PromptOps(KernelOps):
    """Attention of prompts. Layers whose cache is not a `TileCache` are computed by NumPy."""

    def attention(
        self, q: np.ndarray, cache: LayerCache, spans: StepTable | Sequence[SpanView], rule: AttentionRule
    ) -> np.ndarray:
        """Raises KernelError if a group of query heads is larger than a unit has room for."""
        if not isinstance(cache, TileCache):
            return self._launch.run_numpy(super().attention, q, cache, spans, rule)
        if (group := q.shape[1] // cache.format.kv_heads) > MOST_QUERIES:
            raise KernelError(f"No kernel attends with {group} query heads for each KV head")
        out = np.empty(q.shape, np.float32)
        for span in spans:
            self._attend(q[span.rows], out[span.rows], cache, span, rule)
        return out

    def _attend(self, q: np.ndarray, out: np.ndarray, cache: TileCache, span: SpanView, rule: AttentionRule) -> None:
        """Attention of the rows q (T, H, D) of one sequence → out (T, H, D) float32."""
        oldest = max(0, span.position - (rule.window or NO_WINDOW) + 1)
        parts = _parts(cache, span, oldest)
        sink, (first, *others) = _full_segments(cache, span, oldest, max(span.position + len(q), span.sees + 1))
        matrix_format = self._matrix_format(q.shape[2])
        launch = self._launcher(matrix_format, q, out, cache.format.kv_heads, span, rule)
        for number, (start, ids) in enumerate(parts):
            is_last = number == len(parts) - 1
            decoded = self._decode(cache, ids, start, matrix_format)
            segments = [decoded, *sink, first] if is_last else [decoded]
            launch(segments, is_first=number == 0, is_last=is_last and not others)
        if not parts:
            launch([*sink, first], is_first=True, is_last=not others)
        for number, segment in enumerate(others, start=1):
            launch([segment], is_first=False, is_last=number == len(others))

    def _launcher(
        self,
        format: MatrixFormat | None,
        q: np.ndarray,
        out: np.ndarray,
        kv_heads: int,
        span: SpanView,
        rule: AttentionRule,
    ) -> Callable[..., None]:
        """A function that lets the rows of q (T, H, D) of a span attend to segments."""
        (rows, heads, dim), window, transform = q.shape, rule.window or NO_WINDOW, rule.transform
        group = heads // kv_heads
        tile = self._tile(rows, group, kv_heads, MOST_QUERIES if format is None else most_queries(format, dim))
        inverse = NO_ROTATION if transform is None else transform.inverse
        scale_back = None if transform is None else transform.scale_back
        spec = PromptSpec(
            dim, scale_back is not None, inverse.order, rule.softcap is not None, rule.sink_scores is not None
        )
        row_max, row_sum = (np.empty((rows, heads, n), np.float32) for n in (1, 1 if format is None else 16))

        def launch(segments: Sequence[AnySegment], *, is_first: bool, is_last: bool) -> None:
            conversions = list[LaunchSpec]()
            if format is not None:
                segments = [self._as_matrices(segment, format, (kv_heads, dim), conversions) for segment in segments]
            arguments = PromptArguments(
                q=q,
                out=out,
                segments=np.array([words(segment) for segment in segments]),
                row_max=row_max,
                row_sum=row_sum,
                sink_scores=rule.sink_scores,
                scale_back=scale_back,
                input_signs=inverse.input_signs,
                rotation=inverse.memory,
                rows=rows,
                group=group,
                kv_heads=kv_heads,
                tile=tile,
                position=span.position,
                sees=span.sees,
                count=len(segments),
                window=window,
                is_first=is_first,
                is_last=is_last,
                scale=rule.scale,
                softcap=rule.softcap or 0.0,
            )
            kernel = attend(spec) if format is None else attend_by_matrices(format, spec)
            self._launch.launch_all([*conversions, (kernel, -(-rows // tile) * kv_heads, arguments, 1)])
            self._launch.hold(*chain.from_iterable(segments))

        return launch

    def _matrix_format(self, dim: int) -> MatrixFormat | None:
        """Of the matrices whose products prompts attend by; None where products are of float32."""
        launch = self._launch
        format = BFLOAT if launch.attends_in_bfloat else WORDS if launch.level.multiplies_words else None
        return format if format is not None and most_queries(format, dim) else None

    def _as_matrices(
        self, segment: AnySegment, format: MatrixFormat, shape: tuple[int, int], launches: list[LaunchSpec]
    ) -> MatrixSegment:
        """The matrices of a segment, after the launch that is added."""
        if isinstance(segment, MatrixSegment):
            return segment
        k, v, head_stride, start, tokens = segment
        (kv_heads, dim), made = shape, self._matrices(format, shape, start, tokens)
        arguments = MatrixArguments(
            k=k, v=v, keys=made.keys, values=made.values, head_stride=head_stride, tokens=tokens
        )
        launches.append((to_matrices(format, dim), kv_heads * -(-tokens // matrices.KEYS), arguments, 0))
        return made

    def _matrices(self, format: MatrixFormat, shape: tuple[int, int], start: int, tokens: int) -> MatrixSegment:
        """A segment of uninitialized matrices. shape: K, D."""
        (kv_heads, dim), tiles = shape, -(-tokens // matrices.KEYS)
        sizes = format.key_bytes(dim), format.value_bytes(dim)
        keys, values = (self._launch.empty((kv_heads, tiles * size), np.uint8) for size in sizes)
        return MatrixSegment(keys, values, keys.strides[0], values.strides[0], start, tokens)

    def _decode(self, cache: TileCache, ids: np.ndarray, start: int, matrix_format: MatrixFormat | None) -> AnySegment:
        """The segment of the quantized blocks `ids`, whose first token has position `start`."""
        format, tokens = cache.format, len(ids) * cache.format.block_size
        decoding = None if matrix_format is None else cache.matrix_decoding(matrix_format)
        if matrix_format is None or decoding is None:
            return segment(self.decode_to_float(cache, ids), start, tokens)
        made = self._matrices(matrix_format, (format.kv_heads, format.head_dim), start, tokens)
        kernel, arguments = decoding
        arguments = arguments._replace(ids=ids, k=made.keys, v=made.values, count=len(ids))
        self._launch(kernel, format.kv_heads * len(ids), arguments)
        return made

    def decode_to_float(self, cache: TileCache, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decode the B quantized blocks `ids` → k, v (K, B·N, D) float32."""
        format, (kernel, arguments) = cache.format, cache.decoding
        sides = len(format.sides), format.kv_heads, len(ids) * format.block_size, format.head_dim
        k, *more = self._launch.empty(sides)
        v = more[0] if more else k
        arguments = arguments._replace(ids=ids, k=k, v=v, count=len(ids))
        self._launch(kernel, format.kv_heads * len(ids), arguments)
        return k, v

    def _tile(self, rows: int, group: int, kv_heads: int, most: int = MOST_QUERIES) -> int:
        """The number of rows of a unit of up to `most` queries. Results do not depend on it."""
        tile = most // group
        while -(-rows // tile) * kv_heads < _UNITS * self._launch.threads and tile * group >= 2 * _LEAST_QUERIES:
            tile //= 2
        return tile


def _pool_tokens(cache: TileCache) -> int:
    """Tokens whose keys and values in float32 still fit the buffer pool; a power of two."""
    tokens = MOST // (8 * cache.format.kv_heads * cache.format.head_dim)
    return 1 << (tokens.bit_length() - 1)


def _parts(cache: TileCache, span: SpanView, oldest: int) -> list[tuple[int, np.ndarray]]:
    """The quantized blocks from position `oldest` on, in parts: position of the first token, block ids."""
    size, ids = cache.format.block_size, np.asarray(span.table, np.int64)
    # A power of two is a multiple of the kernel's tile, so results equal a single part's.
    block_tile = max(1, min(_DECODED, _pool_tokens(cache)) // size)
    first_block = max(0, oldest - span.table_start) // size
    return [
        (span.table_start + first * size, ids[first : first + block_tile])
        for first in range(first_block, len(ids), block_tile)
    ]


def _text_rows(lengths: Sequence[int], most: int) -> np.ndarray:
    """The `TextRows` of texts, each of up to `most` rows: int64 (n, 4)."""
    text_lengths = np.asarray(lengths, np.int64)
    counts = -(-text_lengths // most)
    part = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first, length = np.repeat(text_lengths.cumsum() - text_lengths, counts), np.repeat(text_lengths, counts)
    return np.stack([first + part * most, np.minimum(length - part * most, most), first, length], axis=1)


def segment(sides: Sequence[np.ndarray], start: int, tokens: int) -> Segment:
    """The segment of k, v (K, at least `tokens`, D) float32, whose first token has position `start`."""
    k, v = sides
    return Segment(k=k, v=v, head_stride=k.strides[0], start=start, tokens=tokens)


def _full_segments(cache: TileCache, span: SpanView, oldest: int, end: int) -> tuple[list[Segment], list[Segment]]:
    """The segments in full precision with positions from `oldest` up to `end`: of the sink block, if there is one, and
    of the buffer, in pieces that are multiples of the kernels' tiles."""
    block_size, sink = cache.format.block_size, list[Segment]()
    if span.sink is not None and oldest < block_size:
        sides = [side.astype(np.float32) for side in cache.full(KVLocation(None, span.sink))]
        sink = [segment(sides, 0, block_size)]
    k, v = (side.astype(np.float32, copy=False) for side in cache.full(span.current))
    tokens, most = min(end - span.current_start, k.shape[1]), max(KEYS, _pool_tokens(cache))
    current = [
        segment((k[:, first:], v[:, first:]), span.current_start + first, min(tokens - first, most))
        for first in range(max(0, oldest - span.current_start) // KEYS * KEYS, tokens, most)
    ]
    return sink, current


class EncoderOps(HeadOps, PromptOps):
    """See `engine.backends.ops.EncoderOps`. NumPy attends where heads are too large for a kernel."""

    def layer_norm(self, x: np.ndarray, norm: tuple[np.ndarray, np.ndarray, float]) -> None:
        weight, bias, eps = norm
        arguments = LayerNormArguments(x=x, weight=weight, bias=bias, columns=x.shape[1], stride=x.strides[0], eps=eps)
        self._launch(layer_norm_rows(), len(x), arguments)

    def self_attention(
        self, qkv: np.ndarray, rope: Rope | None, rule: HeadRule, texts: Texts, scale: float
    ) -> np.ndarray:
        (rows, _, dim), kv_heads, (lengths, window) = qkv.shape, rule.transform.kv_heads, texts
        if not supports(dim):
            return super().self_attention(qkv, rope, rule, texts, scale)
        q, k, v = parts_of(qkv, rule.transform)
        if rope is not None:
            k, v = self._launch.empty((2, kv_heads, rows, dim)).swapaxes(1, 2)
            q = self.transform_into(qkv, rope, rule, (k, v))
        out, group = self._launch.empty(q.shape), q.shape[1] // kv_heads
        text_rows = _text_rows(lengths, self._tile(rows, group, kv_heads))
        arguments = TextArguments(
            q=q,
            k=k,
            v=v,
            out=out,
            texts=text_rows,
            q_stride=q.strides[0],
            row_stride=k.strides[0],
            head_stride=k.strides[1],
            group=group,
            kv_heads=kv_heads,
            reach=max(lengths) if window is None else window // 2,
            scale=scale,
        )
        self._launch(attend_to_texts(dim), len(text_rows) * kv_heads, arguments, grain=1)
        return out
