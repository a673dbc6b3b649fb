"""Blocks of 256 in groups of 32: w = d * (2 * s + 1) * ±point, with points of 4 values. The upper bits of the indices
are bytes of their own."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, flat, halves, unpack_bits
from polarlm.engine.weight_formats._lattice import Grid, Lattice

VALUES, NBYTES = 256, 110
BITS, GROUP = 9, 32
GRID = Grid("IQ3_S", cell=4, signs=8, factor=1)


def unpack(raw: np.ndarray) -> Lattice:
    d, low, high, signs, scales = fields(raw, 2, 64, 8, 32, 4)
    indices = flat(low) | unpack_bits(high, 1, 1).astype(np.uint16) << 8
    return Lattice(GRID, indices, halves(d), unpack_bits(scales, 1, 4), flat(signs))
