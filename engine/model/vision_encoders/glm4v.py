"""The vision encoder of GLM 4.1V, GLM 4.5V and GLM-OCR; see `model_loaders/vision_encoders/glm4v.py`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows
from polarlm.engine.model.vision_encoders._patches import GatedLayer as LayerWeights
from polarlm.engine.model.vision_encoders._patches import PatchReader, merged_places, qwen_patches, resize_positions
from polarlm.engine.weight_formats import Linear, Matrix
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders.glm4v import GlmVisionEncoder

_MERGED_EPS = 1e-5  # in no configuration
_SHARPNESS = -0.75  # of PyTorch's cubic interpolation: the slope of its weights at the neighbours


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in). None for what GLM-OCR does not have."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    norm: Array | None = slot("norm")  # (C,)
    positions: Matrix | None = slot("positions", "matrix")  # (side², C)
    rows_norm: Array = slot("rows_norm")  # (C,)
    merger: Linear = slot("merger", "linear")  # (E, C · merge²)
    projection: Linear = slot("projection", "linear")  # (E, E)
    merged_norm: Array = slot("merged_norm")  # (E,)
    merged_norm_bias: Array = slot("merged_norm_bias")
    gate_up: Linear = slot("gate_up", "linear")  # (2n, E)
    down: Linear = slot("down", "linear")  # (E, n)


class Reader(PatchReader[GlmVisionEncoder, Weights, LayerWeights]):
    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        ops, encoder, w, where = self._ops, self.encoder, self._weights, merged_places(self.encoder, shape)
        x = ops.linear(ops.to_device(qwen_patches(encoder, pixels, shape)), w.patches)
        if w.norm is not None and w.positions is not None:
            positions = ops.to_device(resize_positions(ops.rows(w.positions), encoder, shape, _weights_along))
            ops.rms_norm(x, (w.norm, encoder.eps), residual=positions)
            x = positions
        rope = self._rope(*where, dim=encoder.hidden_size // encoder.heads)
        for layer in self._layers:
            self._add_gated_layer(x, layer, rope, [len(x)])
            yield 0
        ops.rms_norm(x, (w.rows_norm, encoder.eps))
        # Of a row's patches, the values of a channel follow each other.
        merged = ops.to_host(x).reshape(shape.rows, encoder.merge**2, -1).swapaxes(1, 2).reshape(shape.rows, -1)
        y = ops.linear(ops.linear(ops.to_device(merged), w.merger), w.projection)
        self._encoder_ops.layer_norm(y, (w.merged_norm, w.merged_norm_bias, _MERGED_EPS))
        y = ops.activate_halves(y, "gelu")
        return ImageRows(ops.linear(ops.linear(y, w.gate_up, Fusion(activation="silu", consumer=w.down)), w.down))


def _weights_along(source: int, count: int) -> np.ndarray:
    """The weights (count, source) of positions along a side for each of `count` patches: a cubic of the four around its
    middle (Keys 1981, "Cubic convolution interpolation for digital image processing"), the outermost ones repeated."""
    middles = (np.arange(count)[:, None] + 0.5) * (source / count) - 0.5
    places = np.floor(middles) + np.arange(-1, 3)
    t, a, weights = np.abs(middles - places), _SHARPNESS, np.zeros((count, source), np.float32)
    cubics = np.where(t <= 1, ((a + 2) * t - (a + 3)) * t**2 + 1, a * (((t - 5) * t + 8) * t - 4))
    np.add.at(weights, (np.arange(count)[:, None], np.clip(places, 0, source - 1).astype(int)), cubics)
    return weights
