"""Bfloat16: the upper half of a float32."""

from __future__ import annotations

import numpy as np

VALUES, NBYTES = 1, 2


def dequantize(raw: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(raw.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
