"""Half precision: IEEE 754's binary16, in which 65504 is the largest number."""

import numpy as np

VALUES, NBYTES = 1, 2


def dequantize(raw: np.ndarray, out: np.ndarray) -> None:
    out[...] = raw.view("<f2")


def quantize(x: np.ndarray) -> np.ndarray:
    """To nearest even; what lies beyond the largest number becomes that number."""
    return np.clip(x, -65504, 65504).astype("<f2").view(np.uint8)
