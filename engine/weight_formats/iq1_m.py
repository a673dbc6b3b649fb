"""Blocks of 256 in groups of 16: w = d * (2 * s + 1) * (point ± 1/8), with the points of IQ1_S and a sign for each.
The scale lies in the upper bits of the four words of the groups' scales."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, flat, unpack_bits
from polarlm.engine.weight_formats._lattice import Lattice, bits_of, words
from polarlm.engine.weight_formats.iq1_s import GRID as GRID

VALUES, NBYTES = 256, 56
BITS, GROUP = 12, 16


def unpack(raw: np.ndarray) -> Lattice:
    low, high, rest = fields(raw, 32, 16, 8)
    scales = words(rest, "<u2")
    upper = scales >> 12 << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(upper, axis=-1).view(np.float16)
    indices = flat(low) | unpack_bits(high, 1, 4).astype(np.uint16) << 8
    return Lattice(GRID, indices, d, bits_of(scales, range(0, 12, 3), 3))
