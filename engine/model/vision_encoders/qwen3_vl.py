"""The vision encoder of Qwen3-VL, and of Qwen3.5, 3.6 and 3.8; see `model_loaders/vision_encoders/qwen3_vl.py`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows
from polarlm.engine.model.vision_encoders._patches import (
    PatchReader,
    PlainLayer,
    merged_places,
    qwen_patches,
    resize_positions,
)
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders.qwen3_vl import DeepStackVisionEncoder


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in)."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    positions: Matrix = slot("positions", "matrix")  # (side², C)
    norm: Array = slot("merger_norm")  # (C,)
    norm_bias: Array = slot("merger_norm_bias")
    first: Linear = slot("merger_in", "linear")  # (C · merge², C · merge²)
    second: Linear = slot("merger_out", "linear")  # (E, C · merge²)


@dataclass(frozen=True)
class LayerWeights(PlainLayer):
    """None in layers after which no rows are made."""

    deep_norm: Array | None = slot("deep_norm")  # (C · merge²,)
    deep_norm_bias: Array | None = slot("deep_norm_bias")
    deep_in: Linear | None = slot("deep_in", "linear")  # (C · merge², C · merge²)
    deep_out: Linear | None = slot("deep_out", "linear")  # (E, C · merge²)


class Reader(PatchReader[DeepStackVisionEncoder, Weights, LayerWeights]):
    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        ops, encoder, w = self._ops, self.encoder, self._weights
        where, added = merged_places(encoder, shape), []
        x = ops.to_device(resize_positions(ops.rows(w.positions), encoder, shape, _weights_along))
        ops.linear(ops.to_device(qwen_patches(encoder, pixels, shape)), w.patches, residual=x)
        rope = self._rope(*where, dim=encoder.hidden_size // encoder.heads)
        for layer in self._layers:
            self._add_layer(x, layer, rope)
            if layer.deep_in is not None and layer.deep_out is not None:
                y = self._layer_norm(x.reshape(-1, encoder.merged_channels), layer.deep_norm, layer.deep_norm_bias)
                added.append((ops.linear(y, layer.deep_in, Fusion(activation="gelu")), layer.deep_out))
            yield 0
        y = self._layer_norm(x, w.norm, w.norm_bias).reshape(-1, encoder.merged_channels)
        return ImageRows(ops.linear(ops.linear(y, w.first, Fusion(activation="gelu")), w.second), tuple(added))


def _weights_along(source: int, count: int) -> np.ndarray:
    """The weights (count, source) of positions along a side for each of `count` patches: the first and the last have
    those at the ends, the others lie between neighbours."""
    places = np.linspace(0, source - 1, count)[:, None]
    return np.maximum(0, 1 - np.abs(np.arange(source) - places)).astype(np.float32)
