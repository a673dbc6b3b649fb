"""The vision encoder of Qwen3-VL, and of Qwen3.5, 3.6 and 3.8; see `model_loaders/vision_encoders/qwen3_vl.py`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion, Ops
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows
from polarlm.engine.model.vision_encoders._patches import PatchReader, PlainLayer, merged_places, qwen_patches
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
    def __init__(
        self, ops: Ops, encoder: DeepStackVisionEncoder, weights: Weights, layers: Sequence[LayerWeights], nbytes: int
    ):
        super().__init__(ops, encoder, weights, layers, nbytes)
        self._positions = ops.rows(weights.positions)

    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        ops, encoder, w = self._ops, self.encoder, self._weights
        where, added = merged_places(encoder, shape), []
        x = ops.to_device(self._positions_of(where, shape))
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

    def _positions_of(self, where: np.ndarray, shape: ImageShape) -> np.ndarray:
        """The positions (P, C) of patches, between the nearest four of the table."""
        (down, right), side = shape.grid, self.encoder.side
        rows = _stretched(self._positions.reshape(side, side, -1), down * self.encoder.merge)
        return _stretched(rows.swapaxes(0, 1), right * self.encoder.merge)[where[1], where[0]]


def _stretched(x: np.ndarray, count: int) -> np.ndarray:
    """x (n, …) → (count, …): the first and the last are the same, the others lie between neighbours."""
    at = np.arange(count, dtype=np.float32) * np.float32((len(x) - 1) / max(1, count - 1))
    lower = np.minimum(at.astype(np.int64), len(x) - 1)
    fraction = (at - lower)[:, None, None]
    return x[lower] * (1 - fraction) + x[np.minimum(lower + 1, len(x) - 1)] * fraction
