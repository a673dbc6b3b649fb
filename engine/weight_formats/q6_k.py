"""Blocks of 256 in groups of 16: w = d * scale * (q - 32). The upper two bits are bytes of their own."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, flat, halves, unpack_bits

VALUES, NBYTES = 256, 210
BITS, GROUP, ZERO = 6, 16, 32


def unpack(raw: np.ndarray) -> Grouped:
    low, high, scales, d = fields(raw, 128, 64, 16, 2)
    codes = unpack_bits(low, 64, 4) | unpack_bits(high, 32, 2) << np.uint8(4)
    return Grouped(codes, halves(d), flat(scales).view(np.int8), zero=ZERO)
