"""Blocks of 256 in groups of 32: w = d * scale * q - dmin * min."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, scales_and_mins, unpack_bits

VALUES, NBYTES = 256, 144
BITS, GROUP, ZERO = 4, 32, 0


def unpack(raw: np.ndarray) -> Grouped:
    d, dmin, packed, q = fields(raw, 2, 2, 12, 128)
    scales, mins = scales_and_mins(packed)
    return Grouped(unpack_bits(q, 32, BITS), halves(d), scales, -halves(dmin), mins)
