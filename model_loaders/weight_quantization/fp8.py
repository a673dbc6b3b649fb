"""FP8 (E4M3) with a scale for the matrix, for each row, or for each block of 128 × 128 values."""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.weight_quantization.matrix import Codes, Parts, numbers, part, quantized_matrix


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    weight = parts.get("weight")
    if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        return None
    rows, columns = weight.shape
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"  # both are multiplied
    block = settings.integers("weight_block_size") or [128, 128]
    if len(block) != 2 or min(block) < 1:
        raise settings.refuse("weight_block_size", "but must be two positive numbers")
    height, width = block
    shape: tuple[int, ...] = -(-rows // height), -(-columns // width)
    if name in parts and parts[name].shape in ((), (1,), (1, 1), (rows,), (rows, 1)):
        shape, width = parts[name].shape, columns
        height = 1 if rows in shape else rows
    scale = part(parts, name, shape, (*PLAIN, "F8_E8M0"))

    def decode(start: int, stop: int) -> Codes:
        scales = numbers(scale).reshape(-1, -(-columns // width))[np.arange(start, stop) // height]
        return Codes(numbers(weight, start, stop), np.repeat(scales, width, axis=1)[:, :columns])

    return quantized_matrix(weight, (rows, columns), "FP8", decode)
