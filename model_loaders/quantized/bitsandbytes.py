"""bitsandbytes: NF4 and FP4, codes of 16 numbers with a scale for each 64 values; and bytes, with one for each row.

The values of a matrix are one run. Scales may be quantized themselves: codes of 256 numbers, with scales of their own.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np

from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensors import StoredTensor
from polarlm.model_loaders.quantized.matrix import Codes, Parts, integer_type, matrix, numbers, part, unpack

_STATE = "weight.quant_state.bitsandbytes__"
NF4_UNIT = 123.26  # times the numbers of NF4, it is nearest to whole ones: those of engine/weight_formats/nf4.py


def read(parts: Parts, settings: Fields) -> StoredTensor | None:
    kind = next((name.removeprefix(_STATE) for name in parts if name.startswith(_STATE)), None)
    if kind is None:
        return _read_bytes(parts) if "SCB" in parts else None
    state = _state(parts[_STATE + kind])
    shape, size = state.integers("shape"), state.integer("blocksize")
    if len(shape) != 2 or min(shape) < 1:
        raise state.refuse("shape", "but must be two positive numbers")
    rows, columns = shape
    packed = part(parts, "weight", (-(-rows * columns // 2), 1), ("U8",))
    table = numbers(part(parts, "weight.quant_map", (16,), ("F32",)))
    scales = partial(_scales, parts, state, -(-rows * columns // size))
    scales()  # says now what is missing

    def decode(start: int, stop: int) -> Codes:
        first, last = start * columns, stop * columns
        pairs = numbers(packed, first // 2, -(-last // 2))
        codes = unpack(pairs >> 4 | pairs << 4, 4).reshape(-1)[first % 2 :][: last - first]
        places = np.arange(first, last, size if columns % size == 0 else 1) // size
        return Codes(codes.reshape(-1, columns), scales()[places].reshape(stop - start, -1), table=table)

    is_whole = columns % size == 0 and size % 32 == 0
    return matrix(packed, (rows, columns), "NF4" if kind == "nf4" and is_whole else "FP4", decode, NF4_UNIT)


def _scales(parts: Parts, state: Fields, count: int) -> np.ndarray:
    """The scale of each block, float32 (count,)."""
    if "weight.nested_absmax" not in parts:
        return numbers(part(parts, "weight.absmax", (count,), ("F32",)))
    codes, size = numbers(part(parts, "weight.absmax", (count,), ("U8",))), state.integer("nested_blocksize")
    table = numbers(part(parts, "weight.nested_quant_map", (256,), ("F32",)))
    scales = numbers(part(parts, "weight.nested_absmax", (-(-count // size),), ("F32",)))
    return table[codes] * np.repeat(scales, size)[:count] + np.float32(state.number("nested_offset"))


def _state(tensor: StoredTensor) -> Fields:
    """The JSON in a tensor of bytes."""
    try:
        values = dict(json.loads(numbers(tensor).tobytes()))
    except (ValueError, TypeError, RecursionError):
        raise LoadError(
            f"{tensor.source.path} is damaged: {tensor.label} is not a JSON object; download it again."
        ) from None
    return Fields(values, f"{tensor.source.path}, {tensor.label}")


def _read_bytes(parts: Parts) -> StoredTensor:
    weight = part(parts, "weight", None, ("I8",))
    scale = part(parts, "SCB", weight.shape[:1], ("F32",))

    def decode(start: int, stop: int) -> Codes:
        return Codes(numbers(weight, start, stop).view(np.int8), numbers(scale, start, stop)[:, None] / np.float32(127))

    return matrix(weight, (weight.shape[0], weight.shape[1]), integer_type(8, weight.shape[1], True), decode)
