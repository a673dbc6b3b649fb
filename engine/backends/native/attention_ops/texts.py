"""The ops of encoders: layer norm, and attention of texts to all of their own rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.native.attention_ops.heads import HeadOps, Norms, PreparedTransform
from polarlm.engine.backends.native.attention_ops.prompts import PromptOps
from polarlm.engine.backends.native.kernels.attention.unit import supports
from polarlm.engine.backends.native.kernels.rows import LayerNormArguments, layer_norm_rows
from polarlm.engine.backends.native.launch import Launcher
from polarlm.engine.backends.numpy.encoders import EncoderOps as NumpyEncoderOps
from polarlm.engine.backends.numpy.encoders import parts_of


class EncoderOps:
    """See `engine.backends.encoder_ops.EncoderOps`. NumPy attends where heads are too large for a kernel."""

    def __init__(self, launch: Launcher, heads: HeadOps) -> None:
        self._launch, self._heads, self._prompts = launch, heads, PromptOps(launch)
        self._plain = NumpyEncoderOps(heads.transform_heads)

    def layer_norm(self, x: np.ndarray, norm: tuple[np.ndarray, np.ndarray, float]) -> None:
        weight, bias, eps = norm
        arguments = LayerNormArguments(x=x, weight=weight, bias=bias, columns=x.shape[1], stride=x.strides[0], eps=eps)
        self._launch(layer_norm_rows(), len(x), arguments)

    def self_attention(
        self,
        qkv: np.ndarray,
        rope: tuple[np.ndarray, np.ndarray] | None,
        transform: PreparedTransform,
        lengths: Sequence[int],
        scale: float,
        window: int | None = None,
        norms: Norms = None,
    ) -> np.ndarray:
        rows, _, dim = qkv.shape
        if not supports(dim):
            return self._plain.self_attention(qkv, rope, transform, lengths, scale, window, norms)
        if rope is None:
            q, k, v = parts_of(qkv, transform)
            return self._prompts.attend_to_texts(q, (k.swapaxes(0, 1), v.swapaxes(0, 1)), lengths, scale, window)
        k, v = self._launch.empty((2, transform.kv_heads, rows, dim))
        q = self._heads.transform_into(qkv, rope, transform, norms, (k, v))
        return self._prompts.attend_to_texts(q, (k, v), lengths, scale, window)
