"""Blocks of 256 in groups of 16: w = d / 8 * (2 * s + 1) * ±point, with points of 8 values and 7 signs for each."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, halves, unpack_bits
from polarlm.engine.weight_formats._lattice import Grid, Lattice, bits_of, words

VALUES, NBYTES = 256, 74
BITS, GROUP = 9, 16
GRID = Grid("IQ2_XS", cell=8, signs=7, factor=1 / 8)


def unpack(raw: np.ndarray) -> Lattice:
    d, q, scales = fields(raw, 2, 64, 8)
    both = words(q, "<u2")
    indices, signs = bits_of(both, range(1), BITS, np.uint16), bits_of(both, range(9, 10), 7)
    return Lattice(GRID, indices, halves(d), unpack_bits(scales, 1, 4), signs)
