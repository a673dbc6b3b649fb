"""The vision encoder of Mistral Small 3.1 and its successors; see `model_loaders/vision_encoders/pixtral.py`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows
from polarlm.engine.model.vision_encoders._patches import GatedLayer as LayerWeights
from polarlm.engine.model.vision_encoders._patches import PatchReader, cut_patches
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders import elementary
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders.pixtral import PixtralVisionEncoder


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in)."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    norm: Array = slot("norm")  # (C,)
    rows_norm: Array = slot("rows_norm")  # (C,)
    merger: Linear = slot("merger", "linear")  # (C, C · merge²)
    first: Linear = slot("first", "linear")  # (E, C)
    second: Linear = slot("second", "linear")  # (E, E)


class Reader(PatchReader[PixtralVisionEncoder, Weights, LayerWeights]):
    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        ops, encoder, w, (down, right), merge = self._ops, self.encoder, self._weights, shape.grid, self.encoder.merge
        x = ops.linear(ops.to_device(cut_patches(encoder, pixels, channels_first=True)), w.patches)
        ops.rms_norm(x, (w.norm, encoder.eps))
        rows, columns = np.indices((down * merge, right * merge)).reshape(2, -1)
        dim = encoder.hidden_size // encoder.heads
        # Rows and columns take turns at the frequencies of a head, from the highest on.
        first = elementary.power(encoder.theta, np.array(-2 / dim))
        rope = self._rope(rows, columns * first, dim=dim, theta=encoder.theta)
        for layer in self._layers:
            self._add_gated_layer(x, layer, rope, [len(x)])
            yield 0
        ops.rms_norm(x, (w.rows_norm, encoder.rows_eps))
        # Of a row's patches, the values of a channel follow each other.
        merged = ops.to_host(x).reshape(down, merge, right, merge, -1).transpose(0, 2, 4, 1, 3)
        y = ops.linear(ops.to_device(merged.reshape(shape.rows, -1)), w.merger)
        return ImageRows(ops.linear(ops.linear(y, w.first, Fusion(activation="gelu")), w.second))
