"""NVFP4: E2M1, a scale in E4M3 for each 16 inputs, and one that is multiplied (modelopt) or divided by (others)."""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.weight_quantization import matrix
from polarlm.model_loaders.weight_quantization.matrix import Codes, Parts, numbers, part, unpack

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@matrix.DAMAGED_SCALES
def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    packed = parts.get("weight_packed", parts.get("weight"))
    if packed is None or packed.dtype != "U8" or len(packed.shape) != 2:
        return None
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    scale = part(parts, "weight_scale", (rows, columns // 16), ("F8_E4M3",))
    is_divided = "weight_packed" in parts
    name = "weight_global_scale" if is_divided else "weight_scale_2"
    of_matrix = part(parts, name, (1,) if name in parts and parts[name].shape else (), ("F32",))
    factor = numbers(of_matrix).reshape(1) ** np.float32(-1 if is_divided else 1)

    def decode(start: int, stop: int) -> Codes:
        return Codes(unpack(numbers(packed, start, stop), 4), numbers(scale, start, stop) * factor, table=_E2M1)

    return matrix.quantized_matrix(packed, (rows, columns), "FP4", decode)
