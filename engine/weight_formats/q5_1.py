"""Blocks of 32: w = d * q + m. The fifth bits are a word of their own."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, flat, halves, unpack_bits

VALUES, NBYTES, IS_WRITTEN = 32, 24, True
BITS, GROUP, ZERO = 5, 32, 0


def unpack(raw: np.ndarray) -> Grouped:
    d, m, fifth, q = fields(raw, 2, 2, 4, 16)
    codes = unpack_bits(q, 16, 4) | flat(np.unpackbits(fifth, axis=-1, bitorder="little")) << np.uint8(4)
    return Grouped(codes, halves(d), offset=halves(m))
