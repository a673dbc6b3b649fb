"""What Qwen's vision encoders compute alike: patches, and where they are in the image."""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.vision_encoders import ImageShape
from polarlm.model_loaders.vision_encoders._qwen import FRAMES, QwenVisionEncoder


def patches(encoder: QwenVisionEncoder, pixels: np.ndarray, shape: ImageShape) -> np.ndarray:
    """pixels uint8 (height, width, 3) → patches (P, 6 · patch²) float32: channels, and in them two frames."""
    (down, right), merge, side = shape.grid, encoder.merge, encoder.patch
    std = 255 * np.array(encoder.std, np.float32)
    x = (pixels - 255 * np.array(encoder.mean, np.float32)) / std
    x = x.reshape(down, merge, side, right, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return x.reshape(-1, 3, 1, side**2).repeat(FRAMES, axis=2).reshape(-1, encoder.patch_values)


def places(encoder: QwenVisionEncoder, shape: ImageShape) -> np.ndarray:
    """The row and the column of each patch in the image, (2, P)."""
    (down, right), merge = shape.grid, encoder.merge
    grid = np.indices((down * merge, right * merge)).reshape(2, down, merge, right, merge)
    return grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
