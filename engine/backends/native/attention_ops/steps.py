"""The attention op: of steps here, of prompts in `prompts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from polarlm.engine.backends.kv import AttentionRule, SpanView
from polarlm.engine.backends.native.attention_ops.heads import NO_ROTATION
from polarlm.engine.backends.native.attention_ops.prompts import PromptOps
from polarlm.engine.backends.native.attention_ops.step_table import NO_WINDOW, StepTable
from polarlm.engine.backends.native.codecs import MOST_QUERIES
from polarlm.engine.backends.native.codecs.parts.expanded_tiles import expanded_tiles
from polarlm.engine.backends.native.kernels.attention.latent_steps import LANES, LatentBody
from polarlm.engine.backends.native.kernels.attention.partials import MergeArguments, merge, partial_bytes
from polarlm.engine.backends.native.kernels.attention.steps import AttendArguments, AttentionSpec, attend, query_tile_of
from polarlm.engine.backends.native.kv.cache import TileCache
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.jit.lang import Kernel

_MANY_QUERIES = 16  # of a KV head and a sequence: expanding blocks takes about as long as a pass over their codes


class AttentionOps(PromptOps):
    """The ops `attention` and `spans`. Layers whose cache is not a `TileCache` are computed by NumPy."""

    def spans(self, spans: Sequence[SpanView], block_size: int) -> StepTable | Sequence[SpanView]:
        is_step = len(spans) > 0 and all(span.current.buffer is None for span in spans)
        return StepTable(spans, block_size) if is_step else spans

    def attention(
        self, q: np.ndarray, cache: LayerCache, spans: StepTable | Sequence[SpanView], rule: AttentionRule
    ) -> np.ndarray:
        if isinstance(spans, StepTable) and isinstance(cache, TileCache):
            return self._step(q, cache, spans, rule)
        return super().attention(q, cache, spans, rule)

    def _step(self, q: np.ndarray, cache: TileCache, table: StepTable, rule: AttentionRule) -> np.ndarray:
        """Attention of q (T, H, D) → (T, H, D) float32: partial results of chunks of blocks, then their merge."""
        (rows, heads, dim), format, arrays = q.shape, cache.format, table.arrays
        parts = self._launch.empty((rows * heads * arrays.most_chunks * partial_bytes(dim),), np.uint8)
        group = heads // format.kv_heads
        is_latent = cache.value_tiles is None
        query_tile = query_tile_of(group, table.most_rows, LANES if is_latent else MOST_QUERIES)
        sizes = format.block_size, dim, group, query_tile
        is_capped = rule.softcap is not None
        keys, values = cache.memory
        arguments = AttendArguments(
            q=q,
            parts=parts,
            keys=keys,
            values=values,
            mean=cache.mean.get("mean"),
            mean_scale=cache.mean.get("mean_scale"),
            full_k=cache.full_k,
            full_v=cache.full_v,
            headers=arrays.headers,
            table=arrays.table,
            full=arrays.full,
            units=arrays.units,
            kv_heads=format.kv_heads,
            width=arrays.table.shape[1],
            most_full=arrays.full.shape[1],
            most_chunks=arrays.most_chunks,
            window=rule.window or NO_WINDOW,
            scale=rule.scale,
            softcap=rule.softcap or 0.0,
            blocks=keys.shape[1],
        )
        spec = AttentionSpec(cache.key_tiles, cache.value_tiles, format.mean_bits, *sizes, is_capped)
        units = partial(_units, table, format.kv_heads)
        self._launch(self._kernel(spec, table), units, arguments, grain=1)

        out, transform = np.empty(q.shape, np.float32), rule.transform
        inverse = NO_ROTATION if transform is None else transform.inverse
        scale_back = None if transform is None else transform.scale_back
        merge_arguments = MergeArguments(
            parts=parts,
            headers=arrays.headers,
            row_sequences=arrays.row_sequences,
            scale_back=scale_back,
            sink_scores=rule.sink_scores,
            input_signs=inverse.input_signs,
            memory=inverse.memory,
            out=out,
            heads=heads,
            most_chunks=arrays.most_chunks,
        )
        merge_kernel = merge(
            dim, inverse.order, is_scaled=scale_back is not None, has_sink_scores=rule.sink_scores is not None
        )
        self._launch(merge_kernel, rows * heads, merge_arguments)
        return out

    def _kernel(self, spec: AttentionSpec, table: StepTable) -> Kernel[AttendArguments]:
        """That of many rows of a sequence expands blocks first, if there is room, and as soon as it is compiled."""
        if spec.values is None:
            return attend(spec, LatentBody)
        tiles = expanded_tiles(spec.keys, spec.values, spec.block_size, spec.head_dim)
        if tiles is not None and table.most_rows > 1 and table.most_rows * spec.group >= _MANY_QUERIES:
            expanding = replace(spec, expanded_tiles=tiles)
            if table.most_chunk_blocks <= expanding.most_blocks:
                kernel = attend(expanding)
                if self._launch.has_loaded([kernel]):
                    return kernel
                self._launch.expect([kernel])
        return attend(spec)


def _units(table: StepTable, kv_heads: int) -> int:
    return table.unit_count * kv_heads
