"""bitsandbytes: NF4 and FP4, codes of 16 numbers with a scale for each 64 values; and bytes, with one for each row.

The values of a matrix are one run. Scales may be quantized themselves: codes of 256 numbers, with scales of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.weight_quantization import matrix
from polarlm.model_loaders.weight_quantization.matrix import Codes, Parts, numbers, part, unpack

_STATE = "weight.quant_state.bitsandbytes__"
_UNIT = np.float32(123.26)  # what engine/weight_formats/nf4.py multiplies the numbers of NF4 by


@matrix.DAMAGED_SCALES
def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    kind = next((name.removeprefix(_STATE) for name in parts if name.startswith(_STATE)), None)
    if kind is None:
        return _read_bytes(parts) if "SCB" in parts else None
    state = _state(part(parts, _STATE + kind, parts[_STATE + kind].shape, ("U8",)))
    shape, size = state.integers("shape"), state.integer("blocksize")
    if len(shape) != 2 or min(shape) < 1:
        raise state.refuse("shape", "but must be two positive numbers")
    rows, columns = shape
    packed = part(parts, "weight", (-(-rows * columns // 2), 1), ("U8",))
    table = numbers(part(parts, "weight.quant_map", (16,), ("F32",))) * _UNIT
    scales = _scales(parts, state, -(-rows * columns // size))

    def decode(start: int, stop: int) -> Codes:
        first, last = start * columns, stop * columns
        pairs = numbers(packed, first // 2, -(-last // 2))
        codes = unpack(pairs >> 4 | pairs << 4, 4).reshape(-1)[first % 2 :][: last - first]
        places = np.arange(first, last, size if columns % size == 0 else 1) // size - first // size
        scales_here = scales(first // size, -(-last // size))[places].reshape(stop - start, -1)
        return Codes(codes.reshape(-1, columns), scales_here / _UNIT, table=table)

    is_whole = columns % size == 0 and size % 32 == 0
    return matrix.quantized_matrix(packed, (rows, columns), "NF4" if kind == "nf4" and is_whole else "FP4", decode)


def _scales(parts: Parts, state: Fields, count: int) -> Callable[[int, int], np.ndarray]:
    """A function that reads the scales of blocks, first to stop, float32."""
    is_nested = "weight.nested_absmax" in parts
    stored = part(parts, "weight.absmax", (count,), ("U8" if is_nested else "F32",))
    if not is_nested:
        return lambda first, stop: numbers(stored, first, stop)
    size, offset = state.integer("nested_blocksize"), np.float32(state.number("nested_offset"))
    table = numbers(part(parts, "weight.nested_quant_map", (256,), ("F32",)))
    scales = numbers(part(parts, "weight.nested_absmax", (-(-count // size),), ("F32",)))
    return lambda first, stop: table[numbers(stored, first, stop)] * scales[np.arange(first, stop) // size] + offset


def _state(tensor: StoredTensor) -> Fields:
    """The JSON in a tensor of bytes."""
    where = f"{tensor.source.path}, {tensor.label}"
    try:
        return Fields(dict(json.loads(numbers(tensor).tobytes())), where)
    except (ValueError, TypeError, RecursionError):
        raise LoadError(f"{where} is damaged: it is not a JSON object; download the model again.") from None


def _read_bytes(parts: Parts) -> StoredTensor:
    weight = part(parts, "weight", None, ("I8",))
    scale = part(parts, "SCB", weight.shape[:1], ("F32",))

    def decode(start: int, stop: int) -> Codes:
        return Codes(numbers(weight, start, stop), numbers(scale, start, stop)[:, None] / np.float32(127))

    return matrix.quantized_matrix(weight, (weight.shape[0], weight.shape[1]), "Q8_0", decode)
