"""Long prompts over latent vectors, which attend to keys and values of each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.kv import AttentionRule, HeadRule, SpanView
from polarlm.engine.backends.native.attention_ops.heads import HeadOps, PreparedTransform, factor_of
from polarlm.engine.backends.native.attention_ops.prompts import PromptOps, segment
from polarlm.engine.backends.native.attention_ops.step_table import StepTable
from polarlm.engine.backends.native.kv.cache import TileCache
from polarlm.engine.backends.numpy.kv.cache import LayerCache
from polarlm.engine.backends.ops import Expansion

# Least tokens of a buffer whose latent vectors are expanded: for each chunk of rows all are expanded anew. No batch of
# several prompts has as many rows.
_LEAST_EXPANDED = 1024
_EXPANDED = 512  # tokens whose keys and values of all heads are in memory at a time
_ROPE_ALONE = HeadRule(PreparedTransform(0))


class ExpansionOps(HeadOps, PromptOps):
    """See `engine.backends.ops.ExpansionOps`."""

    @property
    def expansion_ops(self) -> ExpansionOps:  # type: ignore[override]
        return self

    def expands(self, cache: LayerCache, spans: StepTable | Sequence[SpanView]) -> bool:
        if (
            not isinstance(cache, TileCache)
            or isinstance(spans, StepTable)
            or len(spans) > 1
            or spans[0].sink is not None
        ):
            return False
        return cache.full(spans[0].current)[0].shape[1] >= _LEAST_EXPANDED

    def join_queries(
        self, own: np.ndarray, rotated: np.ndarray, rope: tuple[np.ndarray, np.ndarray], columns: int
    ) -> np.ndarray:
        q = self._launch.empty((len(rope[0]), len(own) // len(rope[0]), columns))
        self._join(own, rotated, q)
        cos, sin = (np.ascontiguousarray(turns[:, : columns // 2]) for turns in rope)
        return self.transform_into(q, (cos, sin), _ROPE_ALONE, (q, q))

    def attend_by_heads(
        self, q: np.ndarray, cache: TileCache, spans: Sequence[SpanView], rule: AttentionRule, expansion: Expansion
    ) -> np.ndarray:
        (span,), (rows, heads, columns) = spans, q.shape
        (full, _), end = cache.full(span.current), span.position + rows - span.current_start
        out, format = self._launch.empty(q.shape), self._matrix_format(columns)
        launch = self._launcher(format, q, out, heads, span, AttentionRule(rule.scale))
        for first in range(0, end, _EXPANDED):
            stored = full[0, first : first + _EXPANDED].astype(np.float32, copy=False)
            sides = self._expand(stored, rule.transform, expansion, q.shape)
            tile = segment((sides[0], sides[1]), span.current_start + first, min(end - first, _EXPANDED))
            launch([tile], is_first=first == 0, is_last=first + _EXPANDED >= end)
        return self.take_latents(out, expansion.values.shape[0] // heads)

    def _expand(self, stored: np.ndarray, transform: Any, expansion: Expansion, shape: tuple[int, ...]) -> np.ndarray:
        """The keys and values (2, H, S, C) of latent vectors stored (S, D) as `transform` makes them. shape: of q."""
        (rows, dim), (_, heads, columns), latent = stored.shape, shape, expansion.keys.shape[1]
        scale = None if transform.scale_back is None else np.full((1, dim), transform.scale_back[0], np.float32)
        back = PreparedTransform(0, keys=transform.inverse, key_factor=factor_of(scale, transform.inverse.input_signs))
        no_rope = np.ones((rows, dim // 2), np.float32), np.zeros((rows, dim // 2), np.float32)
        x = self.transform_into(stored[:, None], no_rope, HeadRule(back), (stored, stored))  # (S, 1, D)
        rotated, latents = x.reshape(rows, 1, 2, dim // 2)[..., : (dim - latent) // 2], self.take_latents(x, latent)
        sides = self._launch.empty((2, heads, rows, columns))
        for w, side, part in zip(expansion, sides, (rotated, rotated[..., :0]), strict=True):
            own = self.linear(latents, w).reshape(rows * heads, -1)
            self._join(own, np.broadcast_to(part, (rows, heads, *part.shape[2:])), side.swapaxes(0, 1))
        return sides
