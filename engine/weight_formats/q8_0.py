"""Blocks of 32: w = d * q. q are bytes with a sign, which are codes after adding 128."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, flat, halves

VALUES, NBYTES, IS_WRITTEN = 32, 34, True
BITS, GROUP, ZERO = 8, 32, 128


def unpack(raw: np.ndarray) -> Grouped:
    d, q = fields(raw, 2, 32)
    return Grouped(flat(q ^ np.uint8(0x80)), halves(d), zero=ZERO)
