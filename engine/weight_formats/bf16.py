"""Bfloat16: the upper half of a float32."""

import numpy as np

VALUES, NBYTES = 1, 2


def dequantize(raw: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def quantize(x: np.ndarray) -> np.ndarray:
    """To nearest even. NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype("<u2").view(np.uint8)
