"""The vision encoder of Gemma 3; see `model_loaders/vision_encoders/gemma3.py`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows
from polarlm.engine.model.vision_encoders._patches import PatchReader, cut_patches, gemma_means
from polarlm.engine.model.vision_encoders._patches import PlainLayer as LayerWeights
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders.gemma3 import Gemma3VisionEncoder


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in)."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    positions: Matrix = slot("positions", "matrix")  # (P, C)
    norm: Array = slot("norm")  # (C,)
    norm_bias: Array = slot("norm_bias")
    rows_norm: Array = slot("rows_norm")
    projection: Linear = slot("projection", "linear")  # (E, C)


class Reader(PatchReader[Gemma3VisionEncoder, Weights, LayerWeights]):
    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        ops, encoder, w = self._ops, self.encoder, self._weights
        patches = cut_patches(encoder, pixels, channels_first=True)
        x = ops.embed(w.positions, ops.to_device(np.arange(len(patches))))
        ops.linear(ops.to_device(patches), w.patches, residual=x)
        for layer in self._layers:
            self._add_layer(x, layer, None)
            yield 0
        means = gemma_means(ops, self._layer_norm(x, w.norm, w.norm_bias), encoder, shape)
        return ImageRows(ops.linear(ops.to_device(means), w.projection, Fusion((w.rows_norm, encoder.eps))))
