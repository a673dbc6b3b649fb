"""Attention on a GPU: of prompts and steps over the KV store, and of encoders, by the kernels in `cuda/attention/` and
`cuda/encoders/`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Array, row_stride
from polarlm.engine.backends.cuda.heads import NO_ROTATION, DeviceRotation, HeadOps
from polarlm.engine.backends.cuda.kv.cache import BatchTables, LayerCache, SpanTable
from polarlm.engine.backends.cuda.launch import WARP, LaunchConfig, result_type, threads_for
from polarlm.engine.backends.cuda.linear import input_type
from polarlm.engine.backends.kv import AttentionRule, HeadRule, RecordedSpans, Rope
from polarlm.engine.backends.ops import Texts


class AttentionOps(HeadOps):
    """The op `attention`, for chunks of a prompt and for steps."""

    def attention(
        self,
        q: Array,
        cache: LayerCache,
        spans: SpanTable | BatchTables | RecordedSpans,
        rule: AttentionRule,
    ) -> Array:
        inverse: DeviceRotation = NO_ROTATION if rule.transform is None else rule.transform.inverse
        if isinstance(spans, RecordedSpans):
            out = self._device.zeros(q.shape, np.float32)  # rows that are no span's must be numbers
            append, arrays = spans.append_call()

            def work(out: Array, q: Array, *arrays: Array) -> None:
                append(*arrays)
                self._pass(out, q, cache, spans.spans.parts, rule)

            self._device.run_between_graphs(work, (out, q, *arrays))
            return self.rotate(out, inverse)
        parts = prompts, steps = spans.parts
        if prompts is not None or steps is None or cache.format.codec_v is None:
            make = self._device.zeros if cache.format.codec_v is None else self._device.empty  # of no span's rows
            out = make(q.shape, np.float32)
            self._pass(out, q, cache, parts, rule)
            return self.rotate(out, inverse)
        dense = inverse.matrix is not None
        out = self._device.empty(q.shape, np.float32 if dense else input_type(rule.consumer, len(q)))
        self._decode(out, q, cache, steps, rule, NO_ROTATION if dense else inverse)
        return self.rotate_dense(out, inverse)

    def _pass(
        self,
        out: Array,
        q: Array,
        cache: LayerCache,
        parts: tuple[SpanTable | None, SpanTable | None],
        rule: AttentionRule,
    ) -> None:
        """Attention of all rows of a batch to out float32, whose rotation follows. parts: its prompts and its step."""
        prompts, steps = parts
        if cache.format.codec_v is None:
            for spans in filter(None, parts):
                self._attend_to_latents(out, q, cache, spans, rule)
            return
        if prompts is not None:
            self._prefill(out, q, cache, prompts, rule)
        if steps is not None:
            self._decode(out, q, cache, steps, rule, NO_ROTATION)

    def _prefill(self, out: Array, q: Array, cache: LayerCache, spans: SpanTable, rule: AttentionRule) -> None:
        """Attention of prompts' rows of q (T, H, D), whose K/V are in a buffer, to these rows of out float32."""
        current = cache.pools(spans.buffer)
        heads, kv_heads = q.shape[1], cache.format.kv_heads
        for has_codes in spans.kinds():
            # Without quantized blocks, as in the first prompt of a sequence, the kernel for f16 records is faster.
            layouts = cache.layouts if has_codes else cache.full_layouts
            config, size = launch_configs.prefill_attention(*layouts, heads // kv_heads)
            tiles = spans.tiles(self._device, has_codes, heads // kv_heads, size)
            self._launch(
                "prefill_attention",
                (tiles.shape[0], kv_heads),
                _with_rule(config, rule, out),
                *(out, q, cache.keys.quantized, cache.values.quantized, *cache.full, *current),
                *(spans.device_table(self._device), tiles, cache.keys.tables, cache.values.tables),
                *(_scale_back(rule), spans.table.shape[1], kv_heads, heads),
                *(row_stride(q), rule.window or 0, float(rule.scale), rule.sink_scores),
                layouts=layouts,
            )

    def _attend_to_latents(
        self, out: Array, q: Array, cache: LayerCache, spans: SpanTable, rule: AttentionRule
    ) -> None:
        """Attention of rows of q (T, H, D) of prompts or of a step, whose values are keys, to these rows of out."""
        (rows, heads, dim), table = q.shape, spans.device_table(self._device)
        config, columns = launch_configs.latent_attention(cache.layouts[0], heads), launch_configs.LATENT_COLUMNS
        chunks, parts = -(-heads * spans.most_rows // columns), [None]
        if spans.buffer is not None:
            parts = [spans.tiles(self._device, has_codes, heads, columns) for has_codes in spans.kinds()]
        for tiles in parts:
            count, splits, acc, ml = len(spans.table) * chunks, 1, None, None
            if tiles is not None:
                count = tiles.shape[0]
            else:
                splits = launch_configs.latent_splits(len(spans.table), heads, self._device.processors, spans.most_rows)
            if splits > 1:
                acc, ml = (self._device.empty((rows * heads, splits, n), np.float32) for n in (cache.padded, 2))
            self._launch(
                "latent_attention",
                (count, 1, splits),
                config,
                *(out, acc, ml, q, cache.keys.quantized, cache.full.k, cache.pools(spans.buffer).k, table, tiles),
                *(cache.keys.tables, _scale_back(rule), spans.table.shape[1], chunks, row_stride(q)),
                float(rule.scale),
                layouts=cache.layouts,
            )
            if splits > 1:
                self._launch(
                    "latent_sums",
                    (len(spans.table), spans.most_rows * heads),
                    LaunchConfig({}, threads_for(dim)),
                    *(out, acc, ml, table, _scale_back(rule)),
                    *(spans.table.shape[1], splits, heads, dim, cache.padded),
                )

    def _decode(
        self,
        out: Array,
        q: Array,
        cache: LayerCache,
        spans: SpanTable,
        rule: AttentionRule,
        inverse: DeviceRotation,
    ) -> None:
        """Attention of a step's rows of q (T, H, D), whose K/V are in full-precision slots, to these rows of out.

        inverse: a rotation without a matrix.
        """
        (_, heads, _), kv_heads, count = q.shape, cache.format.kv_heads, len(spans.table)
        group, most = heads // kv_heads, spans.most_rows
        chunks, columns = launch_configs.decode_cells(group, most)
        cells, blocks = count * kv_heads * chunks, self._device.processors
        config = launch_configs.decode_attention(*cache.layouts, group, most, count, inverse.order)
        sums = 2 * cells + blocks, columns
        self._launch(
            "decode_attention",
            (blocks,),
            _with_rule(config, rule, out),
            *(out, self._device.empty((*sums, cache.padded), np.float32), self._device.empty((*sums, 2), np.float32)),
            *(self._launch.counts(cells * columns), q, cache.keys.quantized, cache.values.quantized, *cache.full),
            *(spans.device_table(self._device), cache.keys.tables, cache.values.tables),
            *(
                _scale_back(rule),
                inverse.input_signs,
                inverse.output_signs,
                count,
                spans.table.shape[1],
                kv_heads,
                chunks,
            ),
            *(rule.window or 0, float(rule.scale), rule.sink_scores),
            layouts=cache.layouts,
        )


def _with_rule(config: LaunchConfig, rule: AttentionRule, out: Array) -> LaunchConfig:
    """`config` with the DEFINES of soft cap, sink scores and the result: none without them."""
    cap = {} if rule.softcap is None else {"SOFTCAP": float(rule.softcap)}
    sinks = {} if rule.sink_scores is None else {"SINK_SCORES": 1}
    return LaunchConfig({**config.defines, **result_type(out), **cap, **sinks}, config.threads, config.shared)


def _scale_back(rule: AttentionRule) -> Array | None:
    """(H,), multiplies the result."""
    return None if rule.transform is None else rule.transform.scale_back


_WARPS, _WARP_ROWS = 4, 16


class EncoderOps(HeadOps):
    """See `engine.backends.ops.EncoderOps`."""

    def layer_norm(self, x: Array, norm: tuple[Array, Array, float]) -> None:
        (rows, n), (weight, bias, eps) = x.shape, norm
        config = LaunchConfig({}, threads_for(n))
        self._launch("layer_norm", (rows,), config, x, weight, bias, n, row_stride(x), float(eps))

    def clip(self, x: Array, least: float, most: float) -> None:
        (rows, n), threads = x.shape, threads_for(x.shape[1])
        bounds = float(least), float(most)
        self._launch("clip", (-(-n // threads), rows), LaunchConfig({}, threads), x, n, row_stride(x), *bounds)

    def self_attention(self, qkv: Array, rope: Rope | None, rule: HeadRule, texts: Texts, scale: float) -> Array:
        kv_heads, tiles = rule.transform.kv_heads, _tiles(texts.lengths)
        q, k, v = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
        if rope is not None:
            q, k, v = self.transform_heads(qkv, rope, rule)
        out, (_, heads, dim) = self._device.empty(q.shape, np.float32), q.shape
        defines = {"HEAD_DIM": dim, "GROUP": heads // kv_heads, "WARPS": _WARPS}
        self._launch(
            "text_attention",
            (len(tiles), heads),
            LaunchConfig(defines, _WARPS * WARP),
            *(out, q, k, v, self._device.from_host(tiles), heads),
            *(*map(row_stride, (q, k, v)), texts.window or 0, float(scale)),
        )
        return out


def _tiles(lengths: Sequence[int]) -> np.ndarray:
    """The tiles (n, 3) int32 of `text_attention.cu`."""
    ends, step = np.cumsum(lengths), _WARPS * _WARP_ROWS
    tiles = [
        (end - length, end, first)
        for end, length in zip(ends.tolist(), lengths, strict=True)
        for first in range(end - length, end, step)
    ]
    return np.array(tiles, np.int32)
