"""What Qwen's towers compute alike: patches, and where they are in the image."""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.towers import ImageShape
from polarlm.model_loaders.towers._qwen import FRAMES, QwenTower


def patches(tower: QwenTower, pixels: np.ndarray, shape: ImageShape) -> np.ndarray:
    """pixels uint8 (height, width, 3) → patches (P, 6 · patch²) float32: channels, and in them two frames."""
    (down, right), merge, side = shape.grid, tower.merge, tower.patch
    std = 255 * np.array(tower.std, np.float32)
    x = (pixels - 255 * np.array(tower.mean, np.float32)) / std
    x = x.reshape(down, merge, side, right, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return x.reshape(-1, 3, 1, side**2).repeat(FRAMES, axis=2).reshape(-1, tower.patch_values)


def places(tower: QwenTower, shape: ImageShape) -> np.ndarray:
    """The row and the column of each patch in the image, (2, P)."""
    (down, right), merge = shape.grid, tower.merge
    grid = np.indices((down * merge, right * merge)).reshape(2, down, merge, right, merge)
    return grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
