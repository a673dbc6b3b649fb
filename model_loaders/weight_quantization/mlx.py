"""MLX: 4 or 8 bits, a scale and an offset for each group of inputs, packed along the inputs: w = scale * q + offset."""

from __future__ import annotations

from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import PLAIN, StoredTensor
from polarlm.model_loaders.weight_quantization import matrix
from polarlm.model_loaders.weight_quantization.matrix import Codes, Parts, numbers, part, unpack


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    packed = parts.get("weight")
    if packed is None or packed.dtype != "U32" or len(packed.shape) != 2:
        return None
    own = settings.section(packed.label.removesuffix(".weight")) or settings
    bits = own.integer("bits")
    if bits not in (4, 8):
        raise own.refuse("bits", "but only 4 and 8 are supported")
    rows, columns = packed.shape[0], packed.shape[1] * 32 // bits
    group = matrix.group_size(own, columns)
    scale, offset = (part(parts, name, (rows, columns // group), PLAIN) for name in ("scales", "biases"))

    def decode(start: int, stop: int) -> Codes:
        codes = unpack(numbers(packed, start, stop), bits)
        return Codes(codes, numbers(scale, start, stop), numbers(offset, start, stop))

    type = "Q4_1" if bits == 4 and group % 32 == 0 else f"INT{bits}"
    return matrix.quantized_matrix(packed, (rows, columns), type, decode)
