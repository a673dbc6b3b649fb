"""The vision encoder of Gemma 4; see `model_loaders/vision_encoders/gemma4.py`."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.kv import HeadRule, HeadTransform
from polarlm.engine.backends.ops import Array, Fusion, Ops, Texts
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows, parts
from polarlm.engine.model.vision_encoders._patches import PatchReader, cut_patches, gemma_means
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders.gemma4 import PRODUCTS, Gemma4VisionEncoder


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in). None for what a vision encoder does not have."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    positions: Matrix = slot("positions", "matrix")  # (2S, C): of columns, then of rows
    projection: Linear = slot("projection", "linear")  # (E, C)
    std_bias: Array | None = slot("std_bias")  # (C,)
    std_scale: Array | None = slot("std_scale")


@dataclass(frozen=True)
class LayerWeights:
    norm: Array = slot("norm")  # (C,)
    q: Linear = slot("q", "linear")  # (H·D, C)
    k: Linear = slot("k", "linear")  # (K·D, C)
    v: Linear = slot("v", "linear")
    q_norm: Array = slot("q_norm")  # (D,)
    k_norm: Array = slot("k_norm")
    out: Linear = slot("out", "linear")  # (C, H·D)
    post_norm: Array = slot("post_norm")
    ffn_norm: Array = slot("ffn_norm")
    gate: Linear = slot("gate", "linear")  # (F, C)
    up: Linear = slot("up", "linear")
    down: Linear = slot("down", "linear")  # (C, F)
    ffn_post_norm: Array = slot("ffn_post_norm")
    bounds: Array | None = slot("bounds")  # (28,): of inputs and outputs of each product, least and most


class Reader(PatchReader[Gemma4VisionEncoder, Weights, LayerWeights]):
    def __init__(
        self, ops: Ops, encoder: Gemma4VisionEncoder, weights: Weights, layers: Sequence[LayerWeights], nbytes: int
    ):
        super().__init__(ops, encoder, weights, layers, nbytes)
        (self._transform,) = ops.prepare([HeadTransform(encoder.heads, value_eps=encoder.eps)])
        self._ones = ops.to_device(np.ones(encoder.hidden_size))
        self._bounds = [None if one.bounds is None else ops.to_host(one.bounds).reshape(-1, 2, 2) for one in layers]
        self._standard = [None if one is None else ops.to_host(one) for one in (weights.std_bias, weights.std_scale)]

    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        ops, encoder, w, (bias, scale) = self._ops, self.encoder, self._weights, self._standard
        (down, right), merge = shape.grid, encoder.merge
        rows, columns = np.indices((down * merge, right * merge)).reshape(2, -1)
        both = (ops.embed(w.positions, ops.to_device(numbers)) for numbers in (columns, encoder.positions + rows))
        x = ops.to_device(sum(map(ops.to_host, both)))
        patches = cut_patches(encoder, pixels, channels_first=encoder.channels_first)
        ops.linear(ops.to_device(patches), w.patches, residual=x)
        rope = self._rope(columns, rows, dim=encoder.head_dim, theta=encoder.theta)
        for number in range(encoder.layers):
            self._add_attention(x, number, rope)
            for part in parts(ops, x):
                self._add_network(part, number)
            yield 0
        means = gemma_means(ops, x, encoder, shape) * np.float32(math.sqrt(encoder.hidden_size))
        if bias is not None:
            means = (means - bias) * scale
        return ImageRows(ops.linear(ops.to_device(means), w.projection, Fusion((self._ones, encoder.eps))))

    def _product(self, x: Array, number: int, name: str) -> Array:
        """A product of a layer, within its bounds."""
        ops, bounds, weights = self._ops, self._bounds[number], getattr(self._layers[number], name)
        if bounds is None:
            return ops.linear(x, weights)
        of_input, of_output = bounds[[*PRODUCTS].index(name)]
        y = x.copy()
        self._encoder_ops.clip(y, *of_input)
        y = ops.linear(y, weights)
        self._encoder_ops.clip(y, *of_output)
        return y

    def _add_attention(self, x: Array, number: int, rope: tuple[Array, Array]) -> None:
        ops, encoder, w, count = self._ops, self.encoder, self._layers[number], len(x)
        y, shape = self._norm(x, w.norm), (count, encoder.heads, encoder.head_dim)
        qkv = ops.empty((count, 3 * encoder.heads, encoder.head_dim))
        for place, name in enumerate("qkv"):
            qkv[:, place * encoder.heads : (place + 1) * encoder.heads] = self._product(y, number, name).reshape(shape)
        heads = HeadRule(self._transform, (w.q_norm, w.k_norm, encoder.eps))
        mixed = self._encoder_ops.self_attention(qkv, rope, heads, Texts([count]), 1.0)
        mixed = self._product(mixed.reshape(count, encoder.heads * encoder.head_dim), number, "out")
        ops.rms_norm(mixed, (w.post_norm, encoder.eps), residual=x)

    def _add_network(self, x: Array, number: int) -> None:
        ops, w, eps = self._ops, self._layers[number], self.encoder.eps
        y = self._norm(x, w.ffn_norm)
        gate, up = (self._product(y, number, name) for name in ("gate", "up"))
        ops.activate(gate, up, "gelu_tanh")
        ops.rms_norm(self._product(gate, number, "down"), (w.ffn_post_norm, eps), residual=x)

    def _norm(self, x: Array, norm: Array) -> Array:
        """x over its root mean square, times the norm, a copy."""
        y = x.copy()
        self._ops.rms_norm(y, (norm, self.encoder.eps))
        return y
