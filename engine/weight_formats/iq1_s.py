"""Blocks of 256 in groups of 32: w = d * (2 * s + 1) * (point ± 1/8), with points of 8 values of -1, 0 and 1, and a
sign for each group."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, flat, halves
from polarlm.engine.weight_formats._lattice import Grid, Lattice, bits_of, words

VALUES, NBYTES = 256, 50
BITS, GROUP = 12, 32
GRID = Grid("IQ1_S", cell=8, signs=0, factor=1 / 8, delta=True)


def unpack(raw: np.ndarray) -> Lattice:
    d, low, rest = fields(raw, 2, 32, 16)
    high = words(rest, "<u2")
    delta = np.repeat(bits_of(high, range(15, 16), 1, np.uint16), 4, axis=1)
    indices = flat(low) | bits_of(high, range(0, 12, 3), 3, np.uint16) << 8 | delta << 11
    return Lattice(GRID, indices, halves(d), bits_of(high, range(12, 13), 3))
