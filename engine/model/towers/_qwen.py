"""What Qwen's towers compute alike: patches, the angles of RoPE, attention, and rows of a prompt out of patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polarlm.engine.backends.kv import HeadTransform, Norm
from polarlm.engine.backends.ops import Array, Ops
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.towers import ImageShape
from polarlm.model_loaders.towers._qwen import FRAMES, QwenTower

EPS = 1e-6  # of all norms
_THETA = 10_000.0


def patches(tower: QwenTower, pixels: np.ndarray, shape: ImageShape) -> np.ndarray:
    """pixels uint8 (height, width, 3) → patches (P, 6 · patch²) float32: channels, and in them two frames."""
    (down, right), merge, side = shape.grid, tower.merge, tower.patch
    std = 255 * np.array(tower.std, np.float32)
    x = (pixels - 255 * np.array(tower.mean, np.float32)) / std
    x = x.reshape(down, merge, side, right, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return x.reshape(-1, 3, 1, side**2).repeat(FRAMES, axis=2).reshape(-1, tower.patch_values)


def places(tower: QwenTower, shape: ImageShape) -> np.ndarray:
    """The row and the column of each patch in the image, (2, P)."""
    (down, right), merge = shape.grid, tower.merge
    grid = np.indices((down * merge, right * merge)).reshape(2, down, merge, right, merge)
    return grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)


class Patches:
    """What the layers of a tower do to patches x (P, C)."""

    def __init__(self, ops: Ops, tower: QwenTower):
        assert ops.of_encoders is not None
        self.ops, self.tower, self.of_encoders = ops, tower, ops.of_encoders
        (self._transform,) = ops.prepare([HeadTransform(tower.heads)])
        half = tower.hidden_size // tower.heads // 2
        self._frequencies = _THETA ** (-np.arange(0, half, 2) / half)

    def rope(self, places: np.ndarray) -> tuple[Array, Array]:
        """cos and sin (P, D/2): the first half of the pairs of channels is turned by the row, the second by the
        column."""
        angles = np.concatenate([place[:, None] * self._frequencies for place in places], axis=1)
        return self.ops.to_device(np.cos(angles)), self.ops.to_device(np.sin(angles))

    def attend(
        self,
        x: Array,
        y: Array,
        weights: tuple[Linear, Linear],
        rope: tuple[Array, Array],
        lengths: Sequence[int],
        norm: Norm = None,
    ) -> None:
        """Add to x the attention of its rows, normed in y (P, C) or to be normed by `norm`. weights: qkv, out."""
        (qkv, out), heads, dim = weights, self.tower.heads, self.tower.hidden_size // self.tower.heads
        mixed = self.ops.linear(y, qkv, norm=norm).reshape(len(x), 3 * heads, dim)
        mixed = self.of_encoders.self_attention(mixed, rope, self._transform, lengths, dim**-0.5)
        self.ops.linear(mixed.reshape(len(x), heads * dim), out, residual=x)

    def normed(self, x: Array, norm: Array, bias: Array) -> Array:
        """The LayerNorm of x, a copy."""
        y = x.copy()
        self.of_encoders.layer_norm(y, (norm, bias, EPS))
        return y

    def merged(self, x: Array, first: Linear) -> Array:
        """x, with the patches of a row beside each other → (R, n), whose product with another matrix is (R, E)."""
        return self.ops.linear(x.reshape(-1, self.tower.merged), first, activation="gelu")
