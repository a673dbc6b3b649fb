"""The vision encoder of Gemma 3; see `model_loaders/vision_encoders/gemma3.py`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array
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
    projection: Matrix = slot("projection", "matrix")  # (C, E), in × out


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
        means /= np.sqrt(np.square(means).mean(axis=-1, keepdims=True) + np.float32(encoder.eps))
        # Few rows: their product is computed on the host, where the means of patches are.
        return ImageRows(ops.to_device((means * ops.to_host(w.rows_norm)) @ ops.rows(w.projection)))
