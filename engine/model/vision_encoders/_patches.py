"""What vision encoders compute alike with patches x (P, C) of an image: attention, LayerNorms, RoPE, a layer of a plain
ViT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from polarlm.engine.backends.kv import HeadTransform, Norm
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import parts
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.vision_encoders import VisionEncoder

AnyVisionEncoder = TypeVar("AnyVisionEncoder", bound=VisionEncoder)
W = TypeVar("W")  # the weights of a vision encoder
L = TypeVar("L")  # and of a layer


@dataclass(frozen=True)
class PlainLayer:
    """The weights of a layer with LayerNorms before attention and before a network without a gate."""

    norm: Array = slot("norm")  # (C,)
    norm_bias: Array = slot("norm_bias")
    qkv: Linear = slot("qkv", "linear")  # (3C, C)
    out: Linear = slot("out", "linear")  # (C, C)
    ffn_norm: Array = slot("ffn_norm")
    ffn_norm_bias: Array = slot("ffn_norm_bias")
    up: Linear = slot("up", "linear")  # (F, C)
    down: Linear = slot("down", "linear")  # (C, F)


class PatchReader(Generic[AnyVisionEncoder, W, L]):
    def __init__(self, ops: Ops, encoder: AnyVisionEncoder, weights: W, layers: Sequence[L], nbytes: int):
        assert ops.encoder_ops is not None
        self.encoder, self.bytes = encoder, nbytes
        self._ops, self._encoder_ops, self._weights, self._layers = ops, ops.encoder_ops, weights, layers
        (self._transform,) = ops.prepare([HeadTransform(encoder.heads)])

    def _rope(self, *places: np.ndarray, dim: int, theta: float = 10_000.0) -> tuple[Array, Array]:
        """cos and sin (P, D/2): the first half of the pairs of channels is turned by places[0] (P,), the second by
        places[1]."""
        frequencies = theta ** (-np.arange(0, dim // 2, 2) / (dim // 2))
        angles = np.concatenate([place[:, None] * frequencies for place in places], axis=1)
        return self._ops.to_device(np.cos(angles)), self._ops.to_device(np.sin(angles))

    def _add_layer(self, x: Array, w: PlainLayer, rope: tuple[Array, Array] | None) -> None:
        """Add to x what a layer computes of it."""
        ops = self._ops
        self._attend(x, self._layer_norm(x, w.norm, w.norm_bias), (w.qkv, w.out), rope, [len(x)])
        for part in parts(ops, x):
            y = self._layer_norm(part, w.ffn_norm, w.ffn_norm_bias)
            y = ops.linear(y, w.up, activation="plain_gelu_tanh", consumer=w.down)
            ops.linear(y, w.down, residual=part)

    def _attend(
        self,
        x: Array,
        y: Array,
        weights: tuple[Linear, Linear],
        rope: tuple[Array, Array] | None,
        lengths: Sequence[int],
        norm: Norm = None,
    ) -> None:
        """Add to x the attention of its rows, normed in y (P, C) or to be normed by `norm`. weights: qkv, out."""
        (qkv, out), heads, dim = weights, self.encoder.heads, self.encoder.hidden_size // self.encoder.heads
        mixed = self._ops.linear(y, qkv, norm=norm).reshape(len(x), 3 * heads, dim)
        mixed = self._encoder_ops.self_attention(mixed, rope, self._transform, lengths, dim**-0.5)
        self._ops.linear(mixed.reshape(len(x), heads * dim), out, residual=x)

    def _layer_norm(self, x: Array, norm: Array, bias: Array) -> Array:
        """The LayerNorm of x, a copy."""
        y = x.copy()
        self._encoder_ops.layer_norm(y, (norm, bias, self.encoder.eps))
        return y
