"""Blocks of 32: w = d * q + m."""

import functools

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, quantize_gguf, unpack_bits

VALUES, NBYTES = 32, 20
BITS, GROUP, ZERO = 4, 32, 0

quantize = functools.partial(quantize_gguf, "Q4_1")


def unpack(raw: np.ndarray) -> Grouped:
    d, m, q = fields(raw, 2, 2, 16)
    return Grouped(unpack_bits(q, 16, BITS), halves(d), offset=halves(m))
