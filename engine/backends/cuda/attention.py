"""The attention op on a GPU, which launches the kernels in `cuda/attention/`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda import launch_configs
from polarlm.engine.backends.cuda.device import Array, row_stride
from polarlm.engine.backends.cuda.heads import NO_ROTATION, DeviceRotation, DeviceTransform, HeadOps
from polarlm.engine.backends.cuda.kv.cache import LayerCache, PassTables, SpanTable
from polarlm.engine.backends.cuda.launch import LaunchConfig, result_type
from polarlm.engine.backends.cuda.linear import input_type
from polarlm.engine.backends.kv import RecordedSpans, ScoreRule
from polarlm.engine.weight_formats import Linear


class _Parameters(NamedTuple):
    """The op's arguments that every launch takes."""

    scale: float
    window: int  # 0 for none
    scale_back: Array | None  # (H,), multiplies the result
    softcap: float | None
    sink_scores: Array | None  # (H,)

    def added_to(self, config: LaunchConfig, out: Array) -> LaunchConfig:
        """`config` with the DEFINES of soft cap, sink scores and the result: none without them."""
        cap = {} if self.softcap is None else {"SOFTCAP": float(self.softcap)}
        sinks = {} if self.sink_scores is None else {"SINK_SCORES": 1}
        return LaunchConfig({**config.defines, **result_type(out), **cap, **sinks}, config.threads, config.shared)


class AttentionOps(HeadOps):
    """The op `attention`, for chunks of a prompt and for steps."""

    def attention(
        self,
        q: Array,
        cache: LayerCache,
        spans: SpanTable | PassTables | RecordedSpans,
        rule: ScoreRule,
        transform: DeviceTransform | None = None,
        then: Linear | None = None,
    ) -> Array:
        back, scale_back = (NO_ROTATION, None) if transform is None else (transform.back, transform.scale_back)
        parameters = _Parameters(float(rule.scale), rule.window or 0, scale_back, rule.softcap, rule.sink_scores)
        if isinstance(spans, RecordedSpans):
            out = self._device.zeros(q.shape, np.float32)  # rows that are no span's must be numbers
            append, arrays = spans.between()

            def work(out: Array, q: Array, *arrays: Array) -> None:
                append(*arrays)
                self._pass(out, q, cache, spans.spans.parts, parameters)

            self._device.between(work, (out, q, *arrays))
            return self.rotate(out, back)
        parts = prompts, steps = spans.parts
        if prompts is not None or steps is None:
            out = self._device.empty(q.shape, np.float32)
            self._pass(out, q, cache, parts, parameters)
            return self.rotate(out, back)
        dense = back.matrix is not None
        out = self._device.empty(q.shape, np.float32 if dense else input_type(then, len(q)))
        self._decode(out, q, cache, steps, parameters, NO_ROTATION if dense else back)
        return self.rotate_dense(out, back)

    def _pass(
        self,
        out: Array,
        q: Array,
        cache: LayerCache,
        parts: tuple[SpanTable | None, SpanTable | None],
        parameters: _Parameters,
    ) -> None:
        """Attention of all rows of a pass to out float32, whose rotation follows. parts: its prompts and its step."""
        prompts, steps = parts
        if prompts is not None:
            self._prefill(out, q, cache, prompts, parameters)
        if steps is not None:
            self._decode(out, q, cache, steps, parameters, NO_ROTATION)

    def _prefill(self, out: Array, q: Array, cache: LayerCache, spans: SpanTable, parameters: _Parameters) -> None:
        """Attention of prompts' rows of q (T, H, D), whose K/V are in a buffer, to these rows of out float32."""
        current = cache.pools(spans.buffer)
        heads, kv_heads = q.shape[1], cache.format.kv_heads
        for has_codes in spans.kinds():
            # Without quantized blocks, as in the first prompt of a sequence, the kernel for f16 records is faster.
            layouts, high_precision = (cache.layouts, cache.high_precision) if has_codes else (cache.full_layouts, None)
            config, size = launch_configs.prefill_attention(*layouts, heads // kv_heads)
            tiles = spans.tiles(self._device, has_codes, heads // kv_heads, size)
            self._launch(
                "prefill_attention",
                (tiles.shape[0], kv_heads),
                parameters.added_to(config, out),
                *(out, q, cache.keys.quantized, cache.values.quantized, *cache.full, *current),
                *(spans.on(self._device), tiles, cache.keys.tables, cache.values.tables),
                *(parameters.scale_back, spans.table.shape[1], kv_heads, heads),
                *(row_stride(q), parameters.window, parameters.scale, parameters.sink_scores),
                *(() if high_precision is None else _of_kind(high_precision)),
                layouts=layouts,
                high_precision=None if high_precision is None else high_precision.layouts,
            )

    def _decode(
        self, out: Array, q: Array, cache: LayerCache, spans: SpanTable, parameters: _Parameters, back: DeviceRotation
    ) -> None:
        """Attention of a step's rows of q (T, H, D), whose K/V are in full-precision slots, to these rows of out.

        back: a rotation without a matrix.
        """
        (_, heads, _), kv_heads, count = q.shape, cache.format.kv_heads, len(spans.table)
        group, most = heads // kv_heads, spans.most_rows
        chunks, columns = launch_configs.decode_cells(group, most)
        cells, blocks, high_precision = count * kv_heads * chunks, self._device.processors, cache.high_precision
        shape = group, most, count, back.order
        if high_precision is None:
            kernel, kinds, config = "decode_attention", 1, launch_configs.decode_attention(*cache.layouts, *shape)
        else:
            kernel, kinds, blocks = "decode_two_kinds", 2, max(2, blocks)
            config = launch_configs.decode_two_kinds(cache.layouts, high_precision.layouts, *shape)
        sums = kinds * (2 * cells + blocks), columns
        counts = self._launch.counts((2 * kinds - 1) * cells * columns)
        self._launch(
            kernel,
            (blocks,),
            parameters.added_to(config, out),
            *(out, self._device.empty((*sums, cache.padded), np.float32), self._device.empty((*sums, 2), np.float32)),
            *(counts, q, cache.keys.quantized, cache.values.quantized, *cache.full),
            *(spans.on(self._device), cache.keys.tables, cache.values.tables),
            *(parameters.scale_back, back.before, back.after, count, spans.table.shape[1], kv_heads, chunks),
            *(parameters.window, parameters.scale, parameters.sink_scores),
            *(() if high_precision is None else _of_kind(high_precision)),
            layouts=cache.layouts,
            high_precision=None if high_precision is None else high_precision.layouts,
        )


def _of_kind(cache: LayerCache) -> tuple[Array, ...]:
    """The arguments of kernels that read two kinds of blocks for one of them."""
    return cache.keys.quantized, cache.values.quantized, cache.keys.tables, cache.values.tables
