"""The vision encoder of LFM2-VL; see `model_loaders/vision_encoders/lfm2_vl.py`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows
from polarlm.engine.model.vision_encoders._patches import PatchReader, cut_patches, merged_places, resize_positions
from polarlm.engine.model.vision_encoders._patches import PlainLayer as LayerWeights
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders.lfm2_vl import Lfm2VlVisionEncoder

_ROWS_EPS = 1e-5  # in no configuration


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in). None for what a vision encoder does not have."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    positions: Matrix = slot("positions", "matrix")  # (side², C)
    norm: Array = slot("norm")  # (C,)
    norm_bias: Array = slot("norm_bias")
    rows_norm: Array | None = slot("rows_norm")  # (C · merge²,)
    rows_norm_bias: Array | None = slot("rows_norm_bias")
    first: Linear = slot("first", "linear")  # (n, C · merge²)
    second: Linear = slot("second", "linear")  # (E, n)


class Reader(PatchReader[Lfm2VlVisionEncoder, Weights, LayerWeights]):
    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        ops, encoder, w = self._ops, self.encoder, self._weights
        rows, columns = merged_places(encoder, shape)
        x = ops.to_device(resize_positions(ops.rows(w.positions), encoder, shape, _weights_along))
        patches = cut_patches(encoder, pixels, channels_first=encoder.channels_first)
        patches = patches[rows * shape.grid[1] * encoder.merge + columns]
        ops.linear(ops.to_device(patches), w.patches, residual=x)
        for layer in self._layers:
            self._add_layer(x, layer, None)
            yield 0
        y = self._layer_norm(x, w.norm, w.norm_bias).reshape(-1, encoder.merged_channels)
        if w.rows_norm is not None and w.rows_norm_bias is not None:
            self._encoder_ops.layer_norm(y, (w.rows_norm, w.rows_norm_bias, _ROWS_EPS))
        return ImageRows(ops.linear(ops.linear(y, w.first, Fusion(activation="gelu")), w.second))


def _weights_along(source: int, count: int) -> np.ndarray:
    """The weights (count, source) of positions along a side for each of `count` patches: a triangle around its middle,
    which is wider where there are fewer patches than positions, so that each counts."""
    scale = source / count
    middles = (np.arange(count)[:, None] + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(source) - middles) / max(1, scale))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
