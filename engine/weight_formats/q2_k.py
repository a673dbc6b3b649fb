"""Blocks of 256 in groups of 16: w = d * scale * q - dmin * min; a byte holds scale and min of a group."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, flat, halves, unpack_bits

VALUES, NBYTES = 256, 84
BITS, GROUP, ZERO = 2, 16, 0


def unpack(raw: np.ndarray) -> Grouped:
    packed, q, d, dmin = fields(raw, 16, 64, 2, 2)
    scales, mins = flat(packed & 0x0F).view(np.int8), flat(packed >> 4)
    return Grouped(unpack_bits(q, 32, BITS), halves(d), scales, -halves(dmin), mins)
