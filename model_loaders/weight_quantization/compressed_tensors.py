"""Integers of 4 or 8 bits as the package compressed-tensors writes them: w = scale * (q - zero).

They have a sign, and are packed along the inputs after 8 or 128 was added to them, or are bytes.
"""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.weight_quantization import matrix
from polarlm.model_loaders.weight_quantization.matrix import Codes, Parts, numbers, part, unpack


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    is_packed = "weight_packed" in parts
    packed = parts.get("weight_packed" if is_packed else "weight")
    if packed is None or len(packed.shape) != 2 or packed.dtype != ("I32" if is_packed else "I8"):
        return None
    (rows, columns), bits = packed.shape, 8
    if is_packed:
        columns = int(numbers(part(parts, "weight_shape", (2,), ("I64", "I32")))[1])
        bits = 4 if packed.shape[1] <= -(-columns // 8) else 8
        part(parts, "weight_packed", (rows, -(-columns * bits // 32)), ("I32",))
    middle = np.uint8(1 << bits - 1)
    groups = part(parts, "weight_scale", None, PLAIN).shape[1]
    group = columns // max(1, groups)  # a power of two; else the last group is smaller
    groups = groups if group and group * groups == columns and group & group - 1 == 0 else 1
    scale = part(parts, "weight_scale", (rows, groups), PLAIN)
    order, zero = matrix.group_order(parts, "weight_g_idx", columns, groups), parts.get("weight_zero_point")
    is_packed_zero = zero is not None and zero.dtype == "I32"
    if zero is not None:
        part(parts, "weight_zero_point", (-(-rows * bits // 32) if is_packed_zero else rows, groups), ("I32", "I8"))

    def decode(start: int, stop: int) -> Codes:
        words, zeros = numbers(packed, start, stop), np.full((stop - start, groups), middle)
        codes = unpack(words, bits)[:, :columns] if is_packed else words.view(np.uint8) ^ middle
        if zero is not None:
            stored = numbers(zero)
            zeros = (unpack(stored.T, bits).T if is_packed_zero else stored.view(np.uint8) ^ middle)[start:stop]
        scales = numbers(scale, start, stop)
        if order is not None:
            zeros, scales = zeros[:, order], scales[:, order]
        return Codes(matrix.minus_zeros(codes, zeros, bits), scales)

    type = matrix.integer_type(bits, columns // groups if order is None else 0, zero is None)
    return matrix.quantized_matrix(packed, (rows, columns), type, decode)
