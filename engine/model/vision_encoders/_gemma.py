"""What Gemma's vision encoders compute alike: patches of an image, row by row, and the means of some that become a
row."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.ops import Array, Ops
from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders._gemma import GemmaVisionEncoder


def patches(encoder: GemmaVisionEncoder, pixels: np.ndarray, *, channels_first: bool) -> np.ndarray:
    """pixels uint8 (height, width, 3) → patches (P, 3 · patch²) from −1 to 1, with zeros after their values."""
    height, width, side = *pixels.shape[:2], encoder.patch
    x = (pixels * np.float32(2 / 255) - 1).reshape(height // side, side, width // side, side, 3)
    x = x.transpose(0, 2, *((4, 1, 3) if channels_first else (1, 3, 4))).reshape(-1, encoder.patch_values)
    return np.pad(x, ((0, 0), (0, encoder.padded_size - x.shape[1])))


def means(ops: Ops, x: Array, encoder: GemmaVisionEncoder, shape: ImageShape) -> np.ndarray:
    """Patches x (P, C) → the means (R, C) of those of a row, on the host."""
    (down, right), merge = shape.grid, encoder.merge
    return ops.to_host(x).reshape(down, merge, right, merge, -1).mean(axis=(1, 3)).reshape(shape.rows, -1)
