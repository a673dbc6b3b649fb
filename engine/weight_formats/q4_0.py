"""Blocks of 32: w = d * (q - 8)."""

import functools

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, halves, quantize_gguf, unpack_bits

VALUES, NBYTES = 32, 18
BITS, GROUP, ZERO = 4, 32, 8

quantize = functools.partial(quantize_gguf, "Q4_0")


def unpack(raw: np.ndarray) -> Grouped:
    d, q = fields(raw, 2, 16)
    return Grouped(unpack_bits(q, 16, BITS), halves(d), zero=ZERO)
