"""Blocks of 32: w = d * TABLE[q]."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, unpack_bits

VALUES, NBYTES = 32, 18
BITS, GROUP = 4, 32
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def unpack(raw: np.ndarray) -> Grouped:
    d, q = fields(raw, 2, 16)
    return Grouped(unpack_bits(q, 16, BITS), halves(d), table=TABLE)
