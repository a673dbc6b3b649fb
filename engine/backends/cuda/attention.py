"""Attention on a GPU: launches of the kernels in `cuda/attention/`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.backends.cuda import launch_configs
from engine.backends.cuda.cache import Buffer, LayerCache, Spans
from engine.backends.cuda.device import Array, Device
from engine.backends.cuda.heads import HeadOps
from engine.backends.cuda.launch import Launcher, row_stride
from engine.backends.cuda.rotation import NO_TURN, DeviceTransform, OnDevice


class _Call(NamedTuple):
    """The arguments of `attention` for a launch; a window of 0 hides nothing, factors (H,) are of the results."""

    scale: float
    window: int
    factors: Array | None


class AttentionOps:
    """Attention to the KV store: of the rows of a prompt, and of steps."""

    def __init__(self, device: Device, launch: Launcher, heads: HeadOps):
        self._device, self._launch, self._heads = device, launch, heads

    def attention(
        self,
        q: Array,
        cache: LayerCache,
        spans: Spans,
        scale: float,
        window: int | None,
        transform: DeviceTransform | None = None,
    ) -> Array:
        turn, factors = (NO_TURN, None) if transform is None else (transform.back, transform.scale_back)
        call = _Call(float(scale), window or 0, factors)
        if spans.buffer is not None:
            out = self._attend_rows(q, cache, spans, spans.buffer, call)
            return self._heads.rotate(out, turn)
        by_signs = turn if turn.matrix is None else NO_TURN
        return self._heads.dense(self._attend_steps(q, cache, spans, call, by_signs), turn)

    def _attend_rows(self, q: Array, cache: LayerCache, spans: Spans, current: Buffer, call: _Call) -> Array:
        """Of the new rows of one sequence, which are in a buffer."""
        (rows, heads, _), kv_heads = q.shape, cache.format.kv_heads
        group = heads // kv_heads
        # Without quantized blocks, as in every first turn, the kernel for full-precision records is the faster one.
        layouts = cache.layouts if spans.header(0).quantized else cache.full_layouts
        shape, tile = launch_configs.prefill_attention(*layouts, group)
        out = self._device.empty(q.shape, np.float32)
        self._launch(
            "prefill_attention",
            (-(-rows * group // tile), kv_heads),
            shape,
            *(out, q, cache.keys.quantized, cache.values.quantized, *cache.full, *current, spans.on(self._device)),
            *(cache.keys.tables, cache.values.tables, call.factors, spans.table.shape[1], kv_heads, heads),
            *(row_stride(q), call.window, call.scale),
            layouts=layouts,
        )
        return out

    def _attend_steps(self, q: Array, cache: LayerCache, spans: Spans, call: _Call, turn: OnDevice) -> Array:
        """Of a few rows of each sequence, which are in full-precision slots; `turn`ed, which is by signs."""
        (rows, heads, dim), kv_heads, count = q.shape, cache.format.kv_heads, len(spans.table)
        group = heads // kv_heads
        shape, chunks = launch_configs.decode_attention(*cache.layouts, group, spans.most)
        splits = launch_configs.decode_splits(self._device.processors, kv_heads * chunks * count)
        parts = self._device.empty((rows, heads, splits, cache.padded), np.float32)
        sums = self._device.empty((rows, heads, splits, 2), np.float32)
        self._launch(
            "decode_attention",
            (splits, kv_heads * chunks, count),
            shape,
            *(parts, sums, q, cache.keys.quantized, cache.values.quantized, *cache.full),
            *(spans.on(self._device), cache.keys.tables, cache.values.tables, spans.table.shape[1], kv_heads),
            *(call.window, call.scale),
            layouts=cache.layouts,
        )
        out = self._device.empty(q.shape, np.float32)
        shape = launch_configs.combine(dim, turn.order)
        args = out, parts, sums, call.factors, turn.before, turn.behind, heads, splits
        self._launch("combine", (rows * heads,), shape, *args)
        return out
