"""Integers of 4 or 8 bits as the package compressed-tensors writes them: w = scale * (q - zero).

They have a sign, and are packed along the inputs after 8 or 128 was added to them, or are bytes.
"""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.quantized.matrix import (
    Codes,
    Parts,
    group_order,
    integer_type,
    matrix,
    minus_zeros,
    numbers,
    part,
    unpack,
)


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    name = "weight_packed" if "weight_packed" in parts else "weight"
    packed = parts.get(name)
    if packed is None or len(packed.shape) != 2 or packed.dtype != ("I8" if name == "weight" else "I32"):
        return None
    (rows, columns), bits, middle = packed.shape, 8, np.uint8(128)
    if name == "weight_packed":
        columns = int(numbers(part(parts, "weight_shape", (2,), ("I64", "I32")))[1])
        bits = 4 if packed.shape[1] <= -(-columns // 8) else 8
        middle = np.uint8(8 if bits == 4 else 128)
        part(parts, name, (rows, -(-columns * bits // 32)), ("I32",))
    scale = part(parts, "weight_scale", None, PLAIN)
    groups = scale.shape[1]
    part(parts, "weight_scale", (rows, groups if groups and columns % groups == 0 else 1), PLAIN)
    order, zero = group_order(parts, "weight_g_idx", columns, groups), parts.get("weight_zero_point")
    if zero is not None and zero.dtype == "I32":
        part(parts, "weight_zero_point", (-(-rows * bits // 32), groups), ("I32",))
    elif zero is not None:
        part(parts, "weight_zero_point", (rows, groups), ("I8",))

    def decode(start: int, stop: int) -> Codes:
        words, zeros = numbers(packed, start, stop), np.full((stop - start, groups), middle)
        codes = unpack(words, bits)[:, :columns] if name == "weight_packed" else words.view(np.uint8) ^ middle
        if zero is not None:
            stored = numbers(zero)
            zeros = (unpack(stored.T, bits).T if zero.dtype == "I32" else stored.view(np.uint8) ^ middle)[start:stop]
        scales = numbers(scale, start, stop)
        if order is not None:
            zeros, scales = zeros[:, order], scales[:, order]
        return Codes(minus_zeros(codes, zeros), scales)

    type = integer_type(bits, columns // groups if order is None else 0, zero is None)
    return matrix(packed, (rows, columns), type, decode)
