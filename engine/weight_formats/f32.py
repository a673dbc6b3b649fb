"""Float32."""

import numpy as np

VALUES, NBYTES = 1, 4


def dequantize(raw: np.ndarray, out: np.ndarray) -> None:
    out[...] = raw.view("<f4")


def quantize(x: np.ndarray) -> np.ndarray:
    return x.astype("<f4", copy=False).view(np.uint8)
