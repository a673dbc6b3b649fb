"""Blocks of 256 in groups of 16: w = d / 8 * (2 * s + 1) * ±point, with points of 8 values. The upper two bits of the
indices are bytes of their own."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, flat, halves, unpack_bits
from polarlm.engine.weight_formats._lattice import Grid, Lattice

VALUES, NBYTES = 256, 82
BITS, GROUP = 10, 16
GRID = Grid("IQ2_S", cell=8, signs=8, factor=1 / 8)


def unpack(raw: np.ndarray) -> Lattice:
    d, low, signs, high, scales = fields(raw, 2, 32, 32, 8, 8)
    indices = flat(low) | unpack_bits(high, 1, 2).astype(np.uint16) << 8
    return Lattice(GRID, indices, halves(d), unpack_bits(scales, 1, 4), flat(signs))
