"""The tower of Gemma 3; see `model_loaders/towers/gemma3.py`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.kv import HeadTransform
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.model.layers import slot
from polarlm.engine.model.towers import ImageRows, _gemma, parts
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.towers import ImageShape
from polarlm.model_loaders.towers.gemma3 import Gemma3Tower


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in)."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    positions: Matrix = slot("positions", "matrix")  # (P, C)
    norm: Array = slot("norm")  # (C,)
    norm_bias: Array = slot("norm_bias")
    rows_norm: Array = slot("rows_norm")
    projection: Matrix = slot("projection", "matrix")  # (C, E), in × out


@dataclass(frozen=True)
class LayerWeights:
    norm: Array = slot("norm")  # (C,)
    norm_bias: Array = slot("norm_bias")
    qkv: Linear = slot("qkv", "linear")  # (3C, C)
    out: Linear = slot("out", "linear")  # (C, C)
    ffn_norm: Array = slot("ffn_norm")
    ffn_norm_bias: Array = slot("ffn_norm_bias")
    up: Linear = slot("up", "linear")  # (F, C)
    down: Linear = slot("down", "linear")  # (C, F)


class Reader:
    def __init__(self, ops: Ops, tower: Gemma3Tower, weights: Weights, layers: Sequence[LayerWeights], nbytes: int):
        assert ops.of_encoders is not None
        self.tower, self.bytes = tower, nbytes
        self._ops, self._of_encoders, self._weights, self._layers = ops, ops.of_encoders, weights, layers
        (self._transform,) = ops.prepare([HeadTransform(tower.heads)])
        # Few rows: their product is computed on the host, where the means of patches are.
        self._rows_norm, self._projection = ops.to_host(weights.rows_norm), ops.rows(weights.projection)

    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[None, None, ImageRows]:
        ops, tower, w = self._ops, self.tower, self._weights
        patches = _gemma.patches(tower, pixels, channels_first=True)
        x = ops.embed(w.positions, ops.to_device(np.arange(len(patches))))
        ops.linear(ops.to_device(patches), w.patches, residual=x)
        for layer in self._layers:
            self._attend(x, layer)
            for part in parts(ops, x):
                y = self._normed(part, layer.ffn_norm, layer.ffn_norm_bias)
                y = ops.linear(y, layer.up, activation="plain_gelu_tanh", then=layer.down)
                ops.linear(y, layer.down, residual=part)
            yield
        means = _gemma.means(ops, self._normed(x, w.norm, w.norm_bias), tower, shape)
        means /= np.sqrt(np.square(means).mean(axis=-1, keepdims=True) + np.float32(tower.eps))
        return ImageRows(ops.to_device((means * self._rows_norm) @ self._projection))

    def _attend(self, x: Array, layer: LayerWeights) -> None:
        ops, heads = self._ops, self.tower.heads
        dim = self.tower.hidden_size // heads
        qkv = ops.linear(self._normed(x, layer.norm, layer.norm_bias), layer.qkv).reshape(len(x), 3 * heads, dim)
        mixed = self._of_encoders.self_attention(qkv, None, self._transform, [len(x)], dim**-0.5)
        ops.linear(mixed.reshape(len(x), heads * dim), layer.out, residual=x)

    def _normed(self, x: Array, norm: Array, bias: Array) -> Array:
        """The LayerNorm of x, a copy."""
        y = x.copy()
        self._of_encoders.layer_norm(y, (norm, bias, self.tower.eps))
        return y
