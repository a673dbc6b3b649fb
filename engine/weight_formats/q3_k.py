"""Blocks of 256 in groups of 16: w = d * (scale - 32) * (q - 4). The third bits are bytes of their own."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, unpack_bits

VALUES, NBYTES = 256, 110
BITS, GROUP, ZERO = 3, 16, 4


def unpack(raw: np.ndarray) -> Grouped:
    third, q, low, high, d = fields(raw, 32, 64, 8, 4, 2)
    codes = unpack_bits(q, 32, 2) | unpack_bits(third, 32, 1) << np.uint8(2)
    scales = unpack_bits(low, 8, 4) | unpack_bits(high, 4, 2) << np.uint8(4)
    return Grouped(codes, halves(d), scales.view(np.int8) - np.int8(32), zero=ZERO)
