"""Blocks of 256: w = d * (q - 1), with five q of base 3 in a byte, and four in each of the last four bytes."""

import numpy as np

from polarlm.engine.weight_formats._grouped import fields, halves
from polarlm.engine.weight_formats._trits import Trits

VALUES, NBYTES = 256, 54
GROUP = 32
RUNS = (32, 5), (16, 5), (4, 4)


def unpack(raw: np.ndarray) -> Trits:
    packed, d = fields(raw, 52, 2)
    return Trits(RUNS, packed, halves(d))
