"""Blocks of 256 in groups of 32: w = d / 8 * (2 * s + 1) * ±point, with points of 8 values and 7 signs for each."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, flat, halves
from polarlm.engine.weight_formats._lattice import Grid, Lattice, scales_and_signs, words

VALUES, NBYTES = 256, 66
BITS, GROUP = 8, 32
GRID = Grid("IQ2_XXS", cell=8, signs=7, factor=1 / 8)


def unpack(raw: np.ndarray) -> Lattice:
    d, rest = fields(raw, 2, 64)
    pairs = words(rest, "<u4")
    indices = words(pairs[..., 0::2], np.uint8)
    return Lattice(GRID, flat(indices).astype(np.uint16), halves(d), *scales_and_signs(pairs[..., 1::2]))
