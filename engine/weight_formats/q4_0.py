"""Blocks of 32: w = d * (q - 8)."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, unpack_bits

VALUES, NBYTES, IS_WRITTEN = 32, 18, True
BITS, GROUP, ZERO = 4, 32, 8


def unpack(raw: np.ndarray) -> Grouped:
    d, q = fields(raw, 2, 16)
    return Grouped(unpack_bits(q, 16, BITS), halves(d), zero=ZERO)
