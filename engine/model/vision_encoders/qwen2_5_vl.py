"""The vision encoder of Qwen2.5-VL; see `model_loaders/vision_encoders/qwen2_5_vl.py`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from polarlm.engine.backends.ops import Array, Fusion
from polarlm.engine.model.layers import slot
from polarlm.engine.model.vision_encoders import ImageRows
from polarlm.engine.model.vision_encoders._patches import GatedLayer as LayerWeights
from polarlm.engine.model.vision_encoders._patches import PatchReader, merged_places, qwen_patches
from polarlm.engine.weight_formats import Linear
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders.qwen2_5_vl import WindowVisionEncoder


@dataclass(frozen=True)
class Weights:
    """Matrices are (out, in)."""

    patches: Linear = slot("patches", "linear")  # (C, values of a patch)
    norm: Array = slot("merger_norm")  # (C,)
    first: Linear = slot("merger_in", "linear")  # (C · merge², C · merge²)
    second: Linear = slot("merger_out", "linear")  # (E, C · merge²)


class Reader(PatchReader[WindowVisionEncoder, Weights, LayerWeights]):
    def read(self, pixels: np.ndarray, shape: ImageShape) -> Generator[int, None, ImageRows]:
        """Rows are computed in the order of windows."""
        ops, encoder, w = self._ops, self.encoder, self._weights
        order, windows = self._windows(shape)
        values, where = qwen_patches(encoder, pixels, shape), merged_places(encoder, shape)
        x = ops.linear(ops.to_device(values[order]), w.patches)
        rope = self._rope(*where[:, order], dim=encoder.hidden_size // encoder.heads)
        for number, layer in enumerate(self._layers):
            lengths = [len(x)] if number in encoder.whole else windows
            self._add_gated_layer(x, layer, rope, lengths)
            yield 0
        ops.rms_norm(x, (w.norm, encoder.eps))
        merged = ops.linear(x.reshape(-1, encoder.merged_channels), w.first, Fusion(activation="gelu"))
        of_rows = np.argsort(order[:: encoder.merge**2])
        return ImageRows(ops.to_device(ops.to_host(ops.linear(merged, w.second))[of_rows]))

    def _windows(self, shape: ImageShape) -> tuple[np.ndarray, list[int]]:
        """The patches in the order of windows, (P,), and how many a window has; those at the edges have fewer."""
        down, right = np.divmod(np.arange(shape.rows), shape.grid[1])
        window = down // self.encoder.window * shape.grid[1] + right // self.encoder.window
        order, count = np.argsort(window, kind="stable"), self.encoder.merge**2
        lengths = np.unique(window, return_counts=True)[1] * count
        return (order[:, None] * count + np.arange(count)).ravel(), lengths.tolist()
