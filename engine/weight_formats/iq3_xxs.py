"""Blocks of 256 in groups of 32: w = d / 4 * (2 * s + 1) * ±point, with points of 4 values and 7 signs for two."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, flat, halves
from polarlm.engine.weight_formats._lattice import Grid, Lattice, scales_and_signs, words

VALUES, NBYTES = 256, 98
BITS, GROUP = 8, 32
GRID = Grid("IQ3_XXS", cell=4, signs=7, factor=1 / 4)


def unpack(raw: np.ndarray) -> Lattice:
    d, indices, rest = fields(raw, 2, 64, 32)
    return Lattice(GRID, flat(indices).astype(np.uint16), halves(d), *scales_and_signs(words(rest, "<u4")))
