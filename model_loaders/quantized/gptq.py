"""GPTQ: 4 or 8 bits, a scale and a zero point for each group of inputs, packed along them: w = scale * (q - zero).

With `desc_act`, `g_idx` says to which group an input belongs.
"""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.quantized.matrix import (
    Codes,
    Parts,
    columns_of,
    group_order,
    group_size,
    integer_type,
    matrix,
    minus_zeros,
    numbers,
    part,
    unpack,
)


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    if "qweight" not in parts:
        return None
    bits, packed = settings.integer("bits"), part(parts, "qweight", None, ("I32",))
    columns, rows = packed.shape[0] * 32 // bits, packed.shape[1]
    group = group_size(settings, columns)
    scales = part(parts, "scales", (columns // group, rows), PLAIN)
    zeros = part(parts, "qzeros", (columns // group, rows * bits // 32), ("I32",))
    # Files of the first version have the zero points minus one.
    added = np.uint8(settings.text("checkpoint_format", "gptq") == "gptq")
    order = group_order(parts, "g_idx", columns, columns // group)

    def decode(start: int, stop: int) -> Codes:
        codes = unpack(columns_of(packed, start, stop).T, bits)
        of_groups = (unpack(numbers(zeros), bits) + added & np.uint8((1 << bits) - 1)).T[start:stop]
        scales_here = numbers(scales).T[start:stop]
        if order is not None:
            of_groups, scales_here = of_groups[:, order], scales_here[:, order]
        return Codes(minus_zeros(codes, of_groups), scales_here)

    type = integer_type(bits, group if order is None else 0, settings.flag("sym", False))
    return matrix(packed, (rows, columns), type, decode)
