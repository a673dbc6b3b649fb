"""Blocks of 32: w = d * TABLE[q]. The table is bitsandbytes' times 123.26, rounded: off by at most 0.3 % of 1."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, unpack_bits

VALUES, NBYTES = 32, 18
BITS, GROUP = 4, 32
TABLE = np.array([-123, -86, -65, -49, -35, -23, -11, 0, 10, 20, 30, 42, 54, 69, 89, 123], np.int8)


def unpack(raw: np.ndarray) -> Grouped:
    d, q = fields(raw, 2, 16)
    return Grouped(unpack_bits(q, 16, BITS), halves(d), table=TABLE)
