"""Blocks of 256 in groups of 32: w = d * (scale - 32) * TABLE[q], with the table of IQ4_NL."""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, unpack_bits
from polarlm.engine.weight_formats.iq4_nl import TABLE

VALUES, NBYTES = 256, 136
BITS, GROUP = 4, 32


def unpack(raw: np.ndarray) -> Grouped:
    d, high, low, q = fields(raw, 2, 2, 4, 128)
    scales = unpack_bits(low, 1, 4) | unpack_bits(high, 1, 2) << np.uint8(4)
    return Grouped(unpack_bits(q, 16, BITS), halves(d), scales.view(np.int8) - np.int8(32), table=TABLE)
