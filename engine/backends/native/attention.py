"""Attention of prompts, and of steps over tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import SpanView
from polarlm.engine.backends.native.cache import TileCache
from polarlm.engine.backends.native.heads import NO_ROTATION, PreparedTransform
from polarlm.engine.backends.native.kernels.attention import AttendArguments, Attention, attend, query_tile_of
from polarlm.engine.backends.native.kernels.partials import MergeArguments, merge, partial_bytes
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.native.prompts import PromptOps
from polarlm.engine.backends.native.spans import NO_WINDOW, StepTable, is_step
from polarlm.engine.backends.numpy.attention import LayerCache
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.run.workers import aligned
from polarlm.engine.weight_formats import Linear


class AttentionOps:
    """Attention, and the spans that it reads."""

    def __init__(self, launch: Launcher, plain: NumpyOps) -> None:
        self._launch, self._plain = launch, plain
        self._in_numpy = launch.unrecorded(plain.attention, "attention")
        self._prompts = PromptOps(launch, plain)
        self._parts = aligned(0)

    def spans(self, spans: Sequence[SpanView], block_size: int) -> StepTable | Sequence[SpanView]:
        return StepTable(spans, block_size) if is_step(spans) else self._plain.spans(spans, block_size)

    def attention(
        self,
        q: np.ndarray,
        cache: LayerCache,
        spans: StepTable | Sequence[SpanView],
        scale: float,
        window: int | None,
        transform: PreparedTransform | None = None,
        then: Linear | None = None,
    ) -> np.ndarray:
        """In NumPy for a step in a layer without tiles, or whose kernels cannot be compiled."""
        if not isinstance(spans, StepTable):
            return self._prompts.attention(q, cache, spans, scale, window, transform)
        if isinstance(cache, TileCache):
            kernels = _kernels(q, cache, spans, transform)
            if all(self._launch.has(kernel) for kernel in kernels):
                return self._step(kernels, q, cache, spans, scale, window, transform)
        views = self._plain.spans(spans.views, cache.format.block_size)
        return self._in_numpy(q, cache, views, scale, window, transform)

    def _step(
        self,
        kernels: tuple[Kernel[AttendArguments], Kernel[MergeArguments]],
        q: np.ndarray,
        cache: TileCache,
        table: StepTable,
        scale: float,
        window: int | None,
        transform: PreparedTransform | None,
    ) -> np.ndarray:
        (rows, heads, dim), format, (attends, merges) = q.shape, cache.format, kernels
        arrays = table.arrays
        parts = self._partial_results(rows * heads * arrays.most_chunks * partial_bytes(dim))
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
            blocks=keys.shape[1],
            key_stride=keys.strides[0],
            value_stride=values.strides[0],
            width=arrays.table.shape[1],
            most_full=arrays.full.shape[1],
            most_chunks=arrays.most_chunks,
            window=window or NO_WINDOW,
            scale=scale,
        )
        self._launch(attends, lambda: table.unit_count * format.kv_heads, arguments, grain=1)

        out = np.empty(q.shape, np.float32)
        back = NO_ROTATION if transform is None else transform.back
        merging = MergeArguments(
            parts=parts,
            headers=arrays.headers,
            row_sequences=arrays.row_sequences,
            scale_back=None if transform is None else transform.scale_back,
            before=back.before,
            memory=back.memory,
            out=out,
            heads=heads,
            most_chunks=arrays.most_chunks,
        )
        self._launch(merges, rows * heads, merging)
        return out

    def _partial_results(self, nbytes: int) -> np.ndarray:
        """Memory for partial results. All layers use the same: none needs it beyond its own attention."""
        if len(self._parts) < nbytes:
            self._parts = aligned(nbytes)
        return self._parts


def _kernels(
    q: np.ndarray, cache: TileCache, table: StepTable, transform: PreparedTransform | None
) -> tuple[Kernel[AttendArguments], Kernel[MergeArguments]]:
    """The kernels that attend in chunks, and that merge these."""
    (_, heads, dim), format = q.shape, cache.format
    group = heads // format.kv_heads
    sizes = format.block_size, dim, group, query_tile_of(group, table.most_rows)
    attends = attend(Attention(cache.key_tiles, cache.value_tiles, format.mean_bits, *sizes))
    back = NO_ROTATION if transform is None else transform.back
    return attends, merge(dim, back.order, is_scaled=transform is not None and transform.scale_back is not None)
