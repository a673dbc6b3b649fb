"""Blocks of 256 in groups of 32: w = d * scale * q - dmin * min. The fifth bits are bytes of their own."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, scales_and_mins, unpack_bits

VALUES, NBYTES = 256, 176
BITS, GROUP, ZERO = 5, 32, 0


def unpack(raw: np.ndarray) -> Grouped:
    d, dmin, packed, fifth, q = fields(raw, 2, 2, 12, 32, 128)
    codes = unpack_bits(q, 32, 4) | unpack_bits(fifth, 32, 1) << np.uint8(4)
    scales, mins = scales_and_mins(packed)
    return Grouped(codes, halves(d), scales, -halves(dmin), mins)
