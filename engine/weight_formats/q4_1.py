"""Blocks of 32: w = d * q + m."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, unpack_bits

VALUES, NBYTES, IS_WRITTEN = 32, 20, True
BITS, GROUP, ZERO = 4, 32, 0


def unpack(raw: np.ndarray) -> Grouped:
    d, m, q = fields(raw, 2, 2, 16)
    return Grouped(unpack_bits(q, 16, BITS), halves(d), offset=halves(m))
