"""The types of tensors in GGUF files, by their numbers there (ggml's `ggml_type`).

The package `gguf` has the same table, but importing it takes as much memory and time as importing NumPy.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """A type of tensor, whose rows consist of whole blocks of `values` values in `nbytes` bytes."""

    name: str
    values: int
    nbytes: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}
# Types of quantized safetensors that GGUF files do not have; scales are not counted.
OF_SAFETENSORS = {"FP8": (1, 1), "INT8": (1, 1), "INT4": (2, 1), "FP4": (2, 1), "NF4": (32, 18)}
BY_NAME = {type.name: type for type in TYPES.values()}
BY_NAME |= {name: GgmlType(name, *size) for name, size in OF_SAFETENSORS.items()}


def size_of(name: str, count: int) -> int:
    """The number of bytes of `count` values, which are whole blocks, in the type `name`."""
    _, values, nbytes = BY_NAME[name]
    return count // values * nbytes
