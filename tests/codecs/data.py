"""What tests of codecs encode."""

from __future__ import annotations

import numpy as np


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal values, `shape`, float32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
