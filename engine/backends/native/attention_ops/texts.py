"""The ops of encoders: layer norm, and attention of texts to all of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import HeadRule, Rope
from polarlm.engine.backends.native.attention_ops.heads import HeadOps
from polarlm.engine.backends.native.attention_ops.prompts import PromptOps
from polarlm.engine.backends.native.kernels.attention.unit import supports
from polarlm.engine.backends.native.kernels.rows import LayerNormArguments, layer_norm_rows
from polarlm.engine.backends.numpy.attention import parts_of


class EncoderOps(HeadOps, PromptOps):
    """See `engine.backends.ops.EncoderOps`. NumPy attends where heads are too large for a kernel."""

    def layer_norm(self, x: np.ndarray, norm: tuple[np.ndarray, np.ndarray, float]) -> None:
        weight, bias, eps = norm
        arguments = LayerNormArguments(x=x, weight=weight, bias=bias, columns=x.shape[1], stride=x.strides[0], eps=eps)
        self._launch(layer_norm_rows(), len(x), arguments)

    def self_attention(
        self,
        qkv: np.ndarray,
        rope: Rope | None,
        rule: HeadRule,
        lengths: Sequence[int],
        scale: float,
        window: int | None = None,
    ) -> np.ndarray:
        rows, _, dim = qkv.shape
        if not supports(dim):
            return super().self_attention(qkv, rope, rule, lengths, scale, window)
        q, k, v = parts_of(qkv, rule.transform)
        if rope is not None:
            k, v = self._launch.empty((2, rule.transform.kv_heads, rows, dim)).swapaxes(1, 2)
            q = self.transform_into(qkv, rope, rule, (k, v))
        return self.attend_to_texts(q, (k, v), lengths, scale, window)
