"""Blocks of 32: w = scale * TABLE[q]. The scale is a power of two, stored as its exponent.

The table has the values of the format E2M1 doubled, so that they are integers, and the scale is halved.
"""

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, fields, quantize_gguf, unpack_bits

VALUES, NBYTES = 32, 17
BITS, GROUP = 4, 32
TABLE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def quantize(x: np.ndarray) -> np.ndarray:
    raw = quantize_gguf("MXFP4", x)
    # The format has no NaN. Blocks with one become infinite; gguf would make them zero.
    damaged = ~np.isfinite(x.reshape(len(x), x.shape[1] // VALUES, VALUES)).all(axis=-1)
    raw.reshape(*damaged.shape, NBYTES)[damaged] = [255, *[0x77] * 16]
    return raw


def unpack(raw: np.ndarray) -> Grouped:
    exponent, q = fields(raw, 1, 16)
    # 2^(exponent - 128). Float32 stores powers below 2^-126 without an exponent.
    e = exponent[..., 0].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(1 << 21) << (e & 1), (e - 1) << 23)
    return Grouped(unpack_bits(q, 16, BITS), bits.astype(np.uint32).view(np.float32), table=TABLE)
