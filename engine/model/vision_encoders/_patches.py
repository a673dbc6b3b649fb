"""What vision encoders share: attention, LayerNorms, RoPE and a plain ViT's layer for patches x (P, C) of an image, and
how they cut an image into patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from polarlm.engine.backends.kv import HeadRule, HeadTransform, Norm
from polarlm.engine.backends.ops import Array, Fusion, Ops, Texts
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import parts
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import elementary
from polarlm.model_loaders.vision_encoders import ImageShape, VisionEncoder
from polarlm.model_loaders.vision_encoders._qwen import FRAMES, QwenVisionEncoder
from polarlm.model_loaders.vision_encoders._vit import PatchVisionEncoder

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


@dataclass(frozen=True)
class GatedLayer:
    """The weights of a layer with RMSNorms before attention and before a network with a gate. None for what it does not
    have."""

    norm: Array = slot("norm")  # (C,)
    q_norm: Array | None = slot("q_norm")  # (D,)
    k_norm: Array | None = slot("k_norm")  # (D,)
    qkv: Linear = slot("qkv", "linear")  # (3C, C)
    out: Linear = slot("out", "linear")  # (C, C)
    ffn_norm: Array = slot("ffn_norm")
    gate_up: Linear = slot("gate_up", "linear")  # (2F, C)
    down: Linear = slot("down", "linear")  # (C, F)


class PatchReader(Generic[AnyVisionEncoder, W, L]):
    def __init__(self, ops: Ops, encoder: AnyVisionEncoder, weights: W, layers: Sequence[L], nbytes: int):
        assert ops.encoder_ops is not None
        self.encoder, self.bytes = encoder, nbytes
        self._ops, self._encoder_ops, self._weights, self._layers = ops, ops.encoder_ops, weights, layers
        (transform,) = ops.prepare([HeadTransform(encoder.heads)])
        self._heads = HeadRule(transform)

    def _rope(self, *places: np.ndarray, dim: int, theta: float = 10_000.0) -> tuple[Array, Array]:
        """cos and sin (P, D/2): the first half of the pairs of channels is turned by places[0] (P,), the second by
        places[1]."""
        frequencies = elementary.power(theta, -np.arange(0, dim // 2, 2) / (dim // 2))
        cos, sin = elementary.turns(np.concatenate([place[:, None] * frequencies for place in places], axis=1))
        return self._ops.to_device(cos), self._ops.to_device(sin)

    def _add_layer(self, x: Array, w: PlainLayer, rope: tuple[Array, Array] | None) -> None:
        """Add to x what a layer computes of it."""
        ops = self._ops
        self._attend(x, self._layer_norm(x, w.norm, w.norm_bias), (w.qkv, w.out), rope, [len(x)])
        for part in parts(ops, x):
            y = self._layer_norm(part, w.ffn_norm, w.ffn_norm_bias)
            y = ops.linear(y, w.up, Fusion(activation="plain_gelu_tanh", consumer=w.down))
            ops.linear(y, w.down, residual=part)

    def _add_gated_layer(self, x: Array, w: GatedLayer, rope: tuple[Array, Array], lengths: Sequence[int]) -> None:
        """As `_add_layer`, with attention among `lengths` rows each."""
        ops, eps = self._ops, self.encoder.eps
        heads = None if w.q_norm is None or w.k_norm is None else self._heads._replace(norms=(w.q_norm, w.k_norm, eps))
        self._attend(x, x, (w.qkv, w.out), rope, lengths, (w.norm, eps), heads)
        for part in parts(ops, x):
            ops.linear(ops.linear(part, w.gate_up, Fusion((w.ffn_norm, eps), "silu", w.down)), w.down, residual=part)

    def _attend(
        self,
        x: Array,
        y: Array,
        weights: tuple[Linear, Linear],
        rope: tuple[Array, Array] | None,
        lengths: Sequence[int],
        norm: Norm = None,
        rule: HeadRule | None = None,
    ) -> None:
        """Add to x the attention of its rows, normed in y (P, C) or to be normed by `norm`. weights: qkv, out. rule:
        None for heads without norms."""
        (qkv, out), heads, dim = weights, self.encoder.heads, self.encoder.hidden_size // self.encoder.heads
        mixed = self._ops.linear(y, qkv, Fusion(norm)).reshape(len(x), 3 * heads, dim)
        mixed = self._encoder_ops.self_attention(mixed, rope, rule or self._heads, Texts(lengths), dim**-0.5)
        self._ops.linear(mixed.reshape(len(x), heads * dim), out, residual=x)

    def _layer_norm(self, x: Array, norm: Array, bias: Array) -> Array:
        """The LayerNorm of x, a copy."""
        y = x.copy()
        self._encoder_ops.layer_norm(y, (norm, bias, self.encoder.eps))
        return y


def _normal(encoder: PatchVisionEncoder | QwenVisionEncoder, pixels: np.ndarray) -> np.ndarray:
    """pixels uint8 (height, width, 3) → float32: each colour less its mean, over its standard deviation."""
    mean, std = np.array(encoder.mean), np.array(encoder.std)
    return pixels * np.float32(1 / (255 * std)) - np.float32(mean / std)


def cut_patches(encoder: PatchVisionEncoder, pixels: np.ndarray, *, channels_first: bool) -> np.ndarray:
    """pixels uint8 (height, width, 3) → patches (P, 3 · patch²), with zeros after their values."""
    height, width, side = *pixels.shape[:2], encoder.patch
    x = _normal(encoder, pixels).reshape(height // side, side, width // side, side, 3)
    x = x.transpose(0, 2, *((4, 1, 3) if channels_first else (1, 3, 4))).reshape(-1, encoder.patch_values)
    return np.pad(x, ((0, 0), (0, encoder.padded_size - x.shape[1])))


def gemma_means(ops: Ops, x: Array, encoder: PatchVisionEncoder, shape: ImageShape) -> np.ndarray:
    """Patches x (P, C) → the means (R, C) of those of a row, on the host."""
    (down, right), merge = shape.grid, encoder.merge
    return ops.to_host(x).reshape(down, merge, right, merge, -1).mean(axis=(1, 3)).reshape(shape.rows, -1)


def resize_positions(
    positions: np.ndarray, encoder: VisionEncoder, shape: ImageShape, weights: Callable[[int, int], np.ndarray]
) -> np.ndarray:
    """Positions (side², C) of a square → (P, C) of an image's patches. weights(side, count): what the positions along a
    side count for each of so many patches, (count, side)."""
    side = math.isqrt(len(positions))
    down, right = (weights(side, count * encoder.merge) for count in shape.grid)
    resized = _blend(right, _blend(down, positions.reshape(side, side, -1)).swapaxes(0, 1)).swapaxes(0, 1)
    return resized[tuple(merged_places(encoder, shape))]


def _blend(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weights (n, s), of which a row has few numbers that are not 0, times values (s, …) → (n, …). Sums are added in
    the same order on every CPU, unlike a library's."""
    most = np.count_nonzero(weights, axis=1).max()
    places = np.argsort(weights == 0, axis=1, kind="stable")[:, :most]
    shares = np.take_along_axis(weights, places, 1)[..., None, None]
    blended: np.ndarray = sum(shares[:, number] * values[places[:, number]] for number in range(most))
    return blended


def qwen_patches(encoder: QwenVisionEncoder, pixels: np.ndarray, shape: ImageShape) -> np.ndarray:
    """pixels uint8 (height, width, 3) → patches (P, 6 · patch²) float32: channels, and in them two frames."""
    (down, right), merge, side = shape.grid, encoder.merge, encoder.patch
    x = _normal(encoder, pixels).reshape(down, merge, side, right, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return x.reshape(-1, 3, 1, side**2).repeat(FRAMES, axis=2).reshape(-1, encoder.patch_values)


def merged_places(encoder: VisionEncoder, shape: ImageShape) -> np.ndarray:
    """The row and the column of each patch in the image, (2, P); the patches of a row follow each other."""
    (down, right), merge = shape.grid, encoder.merge
    grid = np.indices((down * merge, right * merge)).reshape(2, down, merge, right, merge)
    return grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
