"""Blocks of 256: w = d * (q - 1)."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, unpack_bits

VALUES, NBYTES = 256, 66
BITS, GROUP, ZERO = 2, 32, 1


def unpack(raw: np.ndarray) -> Grouped:
    q, d = fields(raw, 64, 2)
    return Grouped(unpack_bits(q, 32, BITS), halves(d), zero=ZERO)
